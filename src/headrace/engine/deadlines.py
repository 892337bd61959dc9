"""When a call has to be over: set by the caller for one call, bounded by the server for all (R-13).

`serve.gates.deadlines` reads the header of every route; bodies of completions may set it too (`within`). Code that
opens requests reads it with `current`. The time counts from the arrival of the headers, so it covers body, template,
tokeniser, queue and answer. Knows no routes and no engine; `engine.client` keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_deadline: ContextVar[float | None] = ContextVar("headrace_deadline", default=None)


def current() -> float | None:
    """Monotonic seconds at which the call that is being answered has to be over; None: never."""
    return _deadline.get()


@contextlib.contextmanager
def within(seconds: float | None, arrival: float) -> Iterator[None]:
    """What is opened in the block has to be over so long after `arrival`, or earlier if that was said before. None:
    nothing more is said."""
    known = _deadline.get()
    ends = [end for end in (known, None if seconds is None else arrival + seconds) if end is not None]
    token = _deadline.set(min(ends, default=None))
    try:
        yield
    finally:
        _deadline.reset(token)
