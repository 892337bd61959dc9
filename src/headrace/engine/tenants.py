"""Whose call this is: the name of the key that it came with, for as long as it is answered.

The gate sets it, and everything that one caller must not share with another asks for it: the salt of the prefix cache
(S-24), what is stored, the rate limits. Without keys nobody has a name, and everything is everybody's. Knows no keys.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class Tenant(NamedTuple):
    """Who calls. The empty name is the server itself, or anybody where no keys are set."""

    name: str = ""
    is_admin: bool = False


NOBODY = Tenant()
_current: ContextVar[Tenant] = ContextVar("headrace_tenant", default=NOBODY)


def current() -> Tenant:
    """Who calls, here and in every task that was made from here."""
    return _current.get()


@contextlib.contextmanager
def acting_as(tenant: Tenant) -> Iterator[None]:
    """Work for `tenant` in the block."""
    before = _current.set(tenant)
    try:
        yield
    finally:
        _current.reset(before)


def salted(salt: str) -> str:
    """The caller's own salt put behind that of its name, which has one length: no salt reaches another's cache."""
    name = current().name
    return hashlib.sha256(b"headrace cache salt\0" + name.encode()).hexdigest()[:32] + salt if name else salt


def may_see(owner: str) -> bool:
    """Whether the caller may know of what `owner` keeps. What was kept without keys is the administrators'."""
    who = current()
    return who.name in ("", owner) or (not owner and who.is_admin)
