"""`Call`: what a call is known by, from its arrival to its end: in replies, lines of the log, errors and traces.

`serve.gates.calls` enters it with `answering`; code that works for a call reads it with `current`. Knows no routes, no
requests and no HTTP.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

import msgspec

REQUEST_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)


class Call(msgspec.Struct, frozen=True):
    """One call. `call_id` is the caller's if `is_callers`, else fresh; empty outside of any call. `trace` has the
    headers traceparent and tracestate of the W3C, as far as they came and are well formed."""

    call_id: str = ""
    is_callers: bool = False
    path: str = ""
    trace: dict[str, str] = {}


NONE = Call()
_call: ContextVar[Call] = ContextVar("headrace_call", default=NONE)


def current() -> Call:
    """The call that is being answered; `NONE` outside of any."""
    return _call.get()


def fresh_id() -> str:
    """The id that was drawn for the call, so that its reply goes by it too; empty if the caller brought one."""
    call = _call.get()
    return "" if call.is_callers else call.call_id


@contextlib.contextmanager
def answering(call: Call) -> Iterator[None]:
    """What is done in the block is done for `call`."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
