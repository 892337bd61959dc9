"""`CallContext`: what a call is known by, from its arrival to its end: in replies, lines of the log, errors and traces;
and its deadline, by which it has to be over (R-13).

`serve.gates.calls` enters the context with `answering`; code that works for a call reads it with `current`. The
deadline is set by `within`: by `serve.gates.calls` for every route, and by requests that have a timeout. Its time
counts from the arrival of the headers, so it covers body, template, tokeniser, queue and answer; `engine.client` keeps
it. Knows no routes, no requests and no HTTP.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

import msgspec

REQUEST_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)


class CallContext(msgspec.Struct, frozen=True):
    """One call. `call_id` is the caller's if `is_callers`, else fresh; empty outside of any call. `trace` has the
    headers traceparent and tracestate of the W3C, as far as they came and are well formed."""

    call_id: str = ""
    is_callers: bool = False
    path: str = ""
    trace: dict[str, str] = {}


NONE = CallContext()
_context: ContextVar[CallContext] = ContextVar("headrace_call", default=NONE)
_deadline: ContextVar[float | None] = ContextVar("headrace_deadline", default=None)


def current() -> CallContext:
    """The call that is being answered; `NONE` outside of any."""
    return _context.get()


def fresh_id() -> str:
    """The id that was drawn for the call, so that its reply goes by it too; empty if the caller brought one."""
    context = _context.get()
    return "" if context.is_callers else context.call_id


@contextlib.contextmanager
def answering(context: CallContext) -> Iterator[None]:
    """What is done in the block is done for the call of `context`."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def deadline() -> float | None:
    """Monotonic seconds at which the call that is being answered has to be over; None: never."""
    return _deadline.get()


@contextlib.contextmanager
def within(seconds: float | None, arrival: float) -> Iterator[None]:
    """What is opened in the block has to be over so long after `arrival`, or at the deadline that holds already if that
    is earlier. None sets no further deadline."""
    ends = [end for end in (_deadline.get(), None if seconds is None else arrival + seconds) if end is not None]
    token = _deadline.set(min(ends, default=None))
    try:
        yield
    finally:
        _deadline.reset(token)
