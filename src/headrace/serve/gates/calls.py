"""`CallGate`, the outermost ASGI middleware: sets each call's `CallContext` and adds X-Request-Id to the reply.

The id is the caller's X-Request-Id if that is valid in a header (S-22), else a random one. Knows no routes and no
requests. Added by `serve.app`.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from headrace.engine.context import REQUEST_ID, CallContext, answering
from headrace.serve.gates.limits import Scope

HEADER = b"x-request-id"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\w.:-]{0,200})?", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)


class CallGate:
    """Sets the `CallContext` of every call and adds X-Request-Id to every reply."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)

        async def sending(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(name != HEADER for name, _ in headers):
                    message["headers"] = [*headers, (HEADER, context.call_id.encode())]
            await send(message)

        with answering(context):
            await self._app(scope, receive, sending)


def context_of(scope: Scope) -> CallContext:
    """Return the context of the call that an ASGI scope describes. Malformed and repeated headers are left out."""
    headers: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        if name in (HEADER, b"traceparent", b"tracestate"):
            headers.setdefault(name, []).append(value.decode("latin-1"))
    ids = [text for text in headers.get(HEADER, ()) if REQUEST_ID.fullmatch(text)]
    parents = [text for text in headers.get(b"traceparent", ()) if _TRACEPARENT.fullmatch(text)]
    trace = {}
    if len(parents) == 1 and len(headers[b"traceparent"]) == 1:
        trace["traceparent"] = parents[0]
        states = ",".join(headers.get(b"tracestate", ()))
        if _TRACESTATE.fullmatch(states):
            trace["tracestate"] = states
    return CallContext(ids[0] if ids else str(uuid.uuid4()), bool(ids), scope["path"], trace)
