"""When a call has to be over: said by the caller for this call, bounded by the server for all (R-13).

`DeadlineGate` reads the header of every route; bodies of completions may say it too (`within`). Whoever opens
requests asks `current`. The time counts from the arrival of the headers, so it covers body, template, tokeniser, queue
and answer. Knows no routes and no engine; `server.client` holds to it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.responses import Response

from headrace import bounds
from headrace.errors import RequestError
from headrace.server.errors import error_response
from headrace.server.limits import Scope

HEADER = "x-request-timeout"

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


class DeadlineGate:
    """Takes the deadline from the header, for all that happens behind it.

    Args:
        most: seconds that any call may take; 0 for no bound.
        refusals: by the beginning of a path, who tells an error in another shape than OpenAI's.
    """

    def __init__(self, app: Any, most: float, refusals: Mapping[str, Callable[[BaseException], Response]]) -> None:
        self._app = app
        self._most = most or math.inf
        self._refusals = dict(refusals)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now = time.monotonic()
        try:
            seconds = min(self._most, _seconds(scope))
        except RequestError as error:
            path = scope["path"]
            refuse = next((made for start, made in self._refusals.items() if path.startswith(start)), error_response)
            await refuse(error)(scope, receive, send)
            return
        token = _deadline.set(None if seconds == math.inf else now + seconds)
        try:
            await self._app(scope, receive, send)
        finally:
            _deadline.reset(token)


def _seconds(scope: Scope) -> float:
    """What the header says; infinity if there is none."""
    given = [value for name, value in scope["headers"] if name == HEADER.encode()]
    if not given:
        return math.inf
    text = given[0].decode("latin-1")
    try:
        seconds = float(text) if len(given) == 1 else math.nan
    except ValueError:
        seconds = math.nan
    bounds.check("timeout", seconds, HEADER)
    return seconds
