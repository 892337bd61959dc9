"""`DeadlineGate`, an ASGI middleware: reads the caller's x-request-timeout header and sets the call's deadline.

Knows no routes and no engine; `engine.context` holds the deadline.
"""

from __future__ import annotations

import math
import time
from typing import Any

from headrace.engine.context import within
from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.serve.gates.auth import Refusals, refusal
from headrace.serve.gates.limits import Scope

HEADER = "x-request-timeout"


class DeadlineGate:
    """Sets the deadline of every call from its header.

    Args:
        most: seconds that any call may take; 0 for no bound.
        refusals: see `auth.Refusals`.
    """

    def __init__(self, app: Any, most: float, refusals: Refusals) -> None:
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
            await refusal(self._refusals, scope["path"], error)(scope, receive, send)
            return
        with within(None if seconds == math.inf else seconds, now):
            await self._app(scope, receive, send)


def _seconds(scope: Scope) -> float:
    """Return the seconds of the header; infinity if there is none. Raises `RequestError`."""
    values = [value for name, value in scope["headers"] if name == HEADER.encode()]
    if not values:
        return math.inf
    text = values[0].decode("latin-1")
    try:
        seconds = float(text) if len(values) == 1 else math.nan
    except ValueError:
        seconds = math.nan
    bounds.check("timeout", seconds, HEADER)
    return seconds
