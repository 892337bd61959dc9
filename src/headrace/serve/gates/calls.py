"""`CallGate`, the ASGI middleware around all routes: sets what a call is known by and checks it before a route runs.

Every call gets its `CallContext`, and every reply X-Request-Id: the caller's if that is valid in a header (S-22), else
a random one. Then the headers are checked, then the key, and the deadline is set, from the header x-request-timeout.
Knows no routes and no requests. Added by `serve.app`.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from headrace.engine.context import REQUEST_ID, CallContext, answering, within
from headrace.engine.tenants import acting_as
from headrace.protocol import bounds
from headrace.protocol.errors import HeadraceError
from headrace.serve.errors import Api, api_of, error_response
from headrace.serve.gates.auth import ApiKeyGate
from headrace.serve.gates.headers import HeaderGate, Headers, by_name
from headrace.serve.gates.limits import Scope

ID, PARENT, STATE = b"x-request-id", b"traceparent", b"tracestate"
TIMEOUT = "x-request-timeout"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\w.:-]{0,200})?", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)


class CallGate:
    """Passes on the calls that both gates let through.

    Args:
        most: seconds that any call may take; 0 for no bound.
        apis: the APIs other than OpenAI's, whose errors have another shape.
    """

    def __init__(self, app: Any, headers: HeaderGate, keys: ApiKeyGate, most: float, apis: Sequence[Api]) -> None:
        self._app = app
        self._headers, self._keys, self._most, self._apis = headers, keys, most, apis

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        arrival_time = time.monotonic()
        headers = by_name(scope)
        context = context_of(headers, scope["path"])
        added = self._headers.reply_headers(headers)

        async def sending(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
                if all(name != ID for name, _ in message["headers"]):
                    message["headers"].append((ID, context.call_id.encode()))
            await send(message)

        with answering(context), contextlib.ExitStack() as call:
            reply: Any = self._app
            try:
                preflight = self._headers.check(scope, headers)
                if preflight is None:
                    call.enter_context(acting_as(self._keys.tenant(scope)))
                    call.enter_context(within(_seconds(headers, self._most), arrival_time))
                else:
                    reply = preflight
            except HeadraceError as error:
                reply = error_response(error, api_of(self._apis, scope["path"]))
            await reply(scope, receive, sending)


def context_of(headers: Headers, path: str) -> CallContext:
    """Return the context of a call. Malformed and repeated headers are left out."""
    texts = {name: [value.decode("latin-1") for value in headers.get(name, ())] for name in (ID, PARENT, STATE)}
    ids = [text for text in texts[ID] if REQUEST_ID.fullmatch(text)]
    parents = [text for text in texts[PARENT] if _TRACEPARENT.fullmatch(text)]
    trace = {}
    if len(parents) == 1 == len(texts[PARENT]):
        trace["traceparent"] = parents[0]
        states = ",".join(texts[STATE])
        if _TRACESTATE.fullmatch(states):
            trace["tracestate"] = states
    return CallContext(ids[0] if ids else str(uuid.uuid4()), bool(ids), path, trace)


def _seconds(headers: Headers, most: float) -> float | None:
    """Return the seconds that a call may take: at most `most`, or what its header says; None for no bound. Raises
    `RequestError`."""
    values = headers.get(TIMEOUT.encode(), [])
    if not values:
        return most or None
    text = values[0].decode("latin-1")
    try:
        seconds = float(text) if len(values) == 1 else math.nan
    except ValueError:
        seconds = math.nan
    bounds.check("timeout", seconds, TIMEOUT)
    return min(most, seconds) if most else seconds
