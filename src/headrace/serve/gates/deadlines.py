"""`DeadlineGate`, an ASGI middleware: reads the caller's x-request-timeout header and sets the call's deadline.

Knows no routes and no engine; `engine.context` holds the deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from headrace.engine.context import within
from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.serve.errors import error_response
from headrace.serve.gates.limits import Scope

HEADER = "x-request-timeout"


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
        with within(None if seconds == math.inf else seconds, now):
            await self._app(scope, receive, send)


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
