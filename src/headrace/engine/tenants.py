"""The caller of a call, by the name of its key, and how many requests and tokens it may use in a minute.

The gate sets the caller for as long as its call is answered. It decides the salt of the prefix cache (S-24), who may
see stored objects, and the rate limits. Without keys callers have no name, and share everything. Each limit is a bucket
that refills evenly. The tokens of an answer are taken as they come, so a bucket may fall below zero; only the prompt
must be covered in advance. Knows no keys. The gate counts requests, `generation.TextClient` tokens.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

from headrace.engine.context import holding
from headrace.protocol.errors import QueueFullError

MINUTE_S = 60.0


class Tenant(NamedTuple):
    """A caller. The empty name is the server itself, or any caller where no keys are set."""

    name: str = ""
    is_admin: bool = False


NOBODY = Tenant()
_current: ContextVar[Tenant] = ContextVar("headrace_tenant", default=NOBODY)


def current() -> Tenant:
    """Return the caller, here and in every task that was made from here."""
    return _current.get()


def acting_as(tenant: Tenant) -> AbstractContextManager[None]:
    """Work for `tenant` in the block."""
    return holding(_current, tenant)


def salted(salt: str) -> str:
    """Return a call's cache salt after one of the caller's name, of fixed length, so that no salt reaches the cache of
    another caller."""
    name = current().name
    return hashlib.sha256(b"headrace cache salt\0" + name.encode()).hexdigest()[:32] + salt if name else salt


def may_see(owner: str) -> bool:
    """Whether the caller may see the objects of `owner`. Objects that were stored without keys are for administrators
    only."""
    caller = current()
    return caller.name in ("", owner) or (not owner and caller.is_admin)


class RateLimitError(QueueFullError):
    """The caller has used up its limit of a minute (HTTP 429)."""

    code = "rate_limit_exceeded"


class Limits(NamedTuple):
    """Per minute; None is no limit."""

    requests: int | None = None
    tokens: int | None = None


class Bucket:
    """Holds at most `per_minute`, and is full at the start. `clock` returns seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity = self._level = float(per_minute)
        self._clock = clock
        self._time = clock()

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until `amount` is there, or until the bucket is full if it is too small for that."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._time) * self._capacity / MINUTE_S)
        self._time = now
        return max(0.0, (min(amount, self._capacity) - self._level) * MINUTE_S / self._capacity)

    def take(self, amount: float) -> None:
        """Take `amount`, even if there is less."""
        self._level -= amount


class Rates:
    """The buckets of all callers. `limits_of` has the limits of callers by name; the others have `default`."""

    def __init__(
        self,
        default: Limits,
        limits_of: Mapping[str, Limits] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default
        self._limits_of = dict(limits_of or {})
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket | None] = {}

    def count_request(self) -> None:
        """Count one request of the caller. Raises `RateLimitError`."""
        bucket = self._bucket("requests")
        if bucket is not None:
            _require(bucket, 1, "requests")
            bucket.take(1)

    def check_tokens(self, num_tokens: int) -> None:
        """Raise `RateLimitError` if the caller may not send a prompt of so many tokens now."""
        bucket = self._bucket("tokens")
        if bucket is not None:
            _require(bucket, max(num_tokens, 1), "tokens")

    def meter(self) -> Callable[[int], None] | None:
        """Return a function that takes tokens from the caller's bucket, whenever it is called; None: no limit."""
        bucket = self._bucket("tokens")
        return None if bucket is None else bucket.take

    def _bucket(self, kind: str) -> Bucket | None:
        name = current().name
        if (name, kind) not in self._buckets:
            limits = self._limits_of.get(name, Limits())
            per_minute = getattr(limits, kind) if getattr(limits, kind) is not None else getattr(self._default, kind)
            self._buckets[name, kind] = None if per_minute is None else Bucket(per_minute, self._clock)
        return self._buckets[name, kind]


def _require(bucket: Bucket, amount: float, what: str) -> None:
    # A little less is enough, so that a rounding error refuses no request.
    seconds = bucket.seconds_until(amount - 1e-6)
    if seconds > 0:
        wait = math.ceil(seconds)
        raise RateLimitError(f"too many {what} in a minute for this key; try again in {wait} s", retry_after=wait)
