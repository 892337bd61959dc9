"""Requests and tokens per minute, for each caller: buckets that refill evenly, and a 429 with the time to wait.

What an answer will cost is not known before it is made, so a bucket may go into debt: the prompt must be there when it
comes in, and the tokens of the answer are taken as they are made. Knows names and numbers. The gate counts requests,
`generation.Front` tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.engine import tenants
from headrace.protocol.errors import QueueFullError

MINUTE_S = 60.0


class RateLimitError(QueueFullError):
    """The caller has used up what it may use in a minute (HTTP 429)."""

    code = "rate_limit_exceeded"


class Limits(NamedTuple):
    """Per minute; None is no limit."""

    requests: int | None = None
    tokens: int | None = None


class Bucket:
    """Holds at most `per_minute`, and is full at the start. `clock` gives seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity = self._level = float(per_minute)
        self._clock = clock
        self._time = clock()

    def seconds_until(self, amount: float) -> float:
        """How long until `amount` is there, or the bucket is full if it can never hold as much; 0: it is."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._time) * self._capacity / MINUTE_S)
        self._time = now
        return max(0.0, (min(amount, self._capacity) - self._level) * MINUTE_S / self._capacity)

    def take(self, amount: float) -> None:
        """Take it, there or not."""
        self._level -= amount


class Rates:
    """The buckets of all callers. `usual` holds for whoever has none of `own`, by name."""

    def __init__(
        self, usual: Limits, own: Mapping[str, Limits] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._usual = usual
        self._own = dict(own or {})
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket | None] = {}

    def count_request(self) -> None:
        """One request of the caller's. Raises `RateLimitError`."""
        bucket = self._bucket("requests")
        if bucket is not None:
            _require(bucket, 1, "requests")
            bucket.take(1)

    def check_tokens(self, num_tokens: int) -> None:
        """Raises `RateLimitError` unless the caller may bring a prompt of so many tokens now."""
        bucket = self._bucket("tokens")
        if bucket is not None:
            _require(bucket, max(num_tokens, 1), "tokens")

    def meter(self) -> Callable[[int], None] | None:
        """Takes tokens from the caller's bucket, whoever calls it later; None: there is no limit."""
        bucket = self._bucket("tokens")
        return None if bucket is None else bucket.take

    def _bucket(self, kind: str) -> Bucket | None:
        name = tenants.current().name
        if (name, kind) not in self._buckets:
            limits = self._own.get(name, Limits())
            most = getattr(limits, kind) if getattr(limits, kind) is not None else getattr(self._usual, kind)
            self._buckets[name, kind] = None if most is None else Bucket(most, self._clock)
        return self._buckets[name, kind]


def _require(bucket: Bucket, amount: float, what: str) -> None:
    # A hair less than is asked for is enough: the last digit of a float must not keep anybody out.
    seconds = bucket.seconds_until(amount - 1e-6)
    if seconds > 0:
        wait = math.ceil(seconds)
        raise RateLimitError(f"too many {what} in a minute for this key; try again in {wait} s", retry_after=wait)
