"""`CallContext`: the id and the trace of a call, for its replies, log lines and errors; and the call's deadline (R-13).

`serve.gates.calls` enters the context with `answering`; code that works for a call reads it with `current`. The
deadline is set by `within`: by `serve.gates.calls` for every route, and by requests that have a timeout. Its time
counts from the arrival of the headers, so it covers body, template, tokeniser, queue and answer; `engine.client` keeps
it. Knows no routes, no requests and no HTTP.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

import msgspec

T = TypeVar("T")

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
_num_late = 0
_arrival: ContextVar[float | None] = ContextVar("headrace_arrival", default=None)


def current() -> CallContext:
    """Return the call that is being answered; `NONE` outside of any."""
    return _context.get()


def fresh_id() -> str:
    """Return the id that was drawn for the call, which is its reply's too; empty if the caller sent one."""
    context = _context.get()
    return "" if context.is_callers else context.call_id


def count_late() -> None:
    """Count a call whose deadline passed before it reached the engine's client."""
    global _num_late
    _num_late += 1


def num_late() -> int:
    """Return how many such calls there were in this process."""
    return _num_late


@contextlib.contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give `variable` this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def answering(context: CallContext) -> AbstractContextManager[None]:
    """Make `context` the call of all code that runs in the block."""
    return holding(_context, context)


def deadline() -> float | None:
    """Return the monotonic seconds at which the call that is being answered has to be over; None: never."""
    return _deadline.get()


def arrival() -> float:
    """Return the monotonic seconds at which the headers of the call that is being answered had come; now outside of
    any."""
    time_of_call = _arrival.get()
    return time.monotonic() if time_of_call is None else time_of_call


def arrived(seconds: float) -> AbstractContextManager[None]:
    """Make `seconds` (monotonic) the arrival of the call that the block answers."""
    return holding(_arrival, seconds)


def within(seconds: float | None, arrival: float) -> AbstractContextManager[None]:
    """Set the deadline of all requests opened in the block to so many seconds after `arrival`, unless an earlier one
    holds already. None sets no further deadline."""
    ends = [end for end in (_deadline.get(), None if seconds is None else arrival + seconds) if end is not None]
    return holding(_deadline, min(ends, default=None))
