"""`Connection`: uvicorn's HTTP connection with limits on headers and on the number of connections (S-19).

uvicorn alone waits for headers without a limit, and answers all malformed requests with 400 and plain text. Here the
headers must come within `HEADER_S`, headers that are too large get a 431, and the number of connections leaves the
process enough files for the rest. Knows no routes. Passed to uvicorn by `serve.app`.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from headrace.engine.links import read_small

HEADER_S = 10.0
"""Seconds from the connection's start, or from the first byte of a further request, to the end of the headers."""
SPARE_FILES = 64
"""Open files reserved for the engine, the storage and the log."""

_ERRORS = {
    400: ("bad_http", "this is no HTTP request"),
    408: ("headers_timeout", f"the headers did not come within {HEADER_S:g} seconds"),
    431: ("headers_too_large", "the headers are too large"),
    501: ("bad_http", "this transfer-encoding is not supported"),
    503: ("too_many_connections", "too many connections are open"),
}


def max_connections() -> int:
    """Return how many connections may be open, by the limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - SPARE_FILES, soft // 2)


class Connection(H11Protocol):
    """One client's HTTP connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        read_small(transport)
        if len(self.connections) > max_connections():
            self._refuse(503)
            return
        self._header_timer = self.loop.call_later(HEADER_S, self._on_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._header_timer = self.loop.call_later(HEADER_S, self._on_late)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._disarm()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(hint if hint in _ERRORS else 400)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_late(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Send the error and close the connection; close it without an error in the middle of a reply."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            code, message = _ERRORS[status]
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = msgspec.json.encode({"error": error})
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"content-length", str(len(body)).encode()))
            reply = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
