"""`Connection`: uvicorn's HTTP connection with a timer in every state, strict lines, and bounds on connections (S-19).

uvicorn alone waits without a limit for headers, for the rest of a body whose reply is sent, and for clients that do not
read. Here a connection always waits for one thing, a `Wait`, and one timer is armed from its first moment to its last.
`TABLE` gives the wait for each pair of h11's states:

| client / server         | IDLE          | SEND_RESPONSE | SEND_BODY | DONE | MUST_CLOSE, CLOSED, ERROR |
|-------------------------|---------------|---------------|-----------|------|---------------------------|
| IDLE                    | HEADERS, NEXT | -             | -         | -    | END                       |
| SEND_BODY               | -             | REPLY         | REPLY     | REST | END                       |
| DONE                    | -             | REPLY         | REPLY     | -    | END                       |
| MUST_CLOSE              | -             | REPLY         | REPLY     | -    | END                       |
| MIGHT_SWITCH_PROTOCOL   | -             | REPLY         | -         | -    | END                       |
| CLOSED, ERROR, SWITCHED | END           | END           | END       | END  | END                       |

A pair marked - is never left standing, and is an END too. A transport that closes is an END in any state. In REPLY the
call has other bounds (`limits` for its body, its deadline); the timer checks then, as in END, that the client reads the
bytes sent to it. A client that ends its side ends the connection.

The last `RESERVED` connections answer probes only. Knows no other routes. Passed to uvicorn by `serve.app`.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import functools
import logging
import resource
import sys
import termios
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

import h11
import msgspec
from h11._state import MIGHT_SWITCH_PROTOCOL
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from headrace.engine.links import read_small
from headrace.serve.errors import CallError, error_response
from headrace.serve.gates.accept import peer_of
from headrace.serve.gates.framing import RULES, StrictBuffer

SPARE_FILES = 64
"""Open files reserved for the engine, the storage and the log."""
RESERVED = 16
"""Connections that answer only `PROBES`: the last ones, and all that an address opens beyond its bound."""
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/health/serving", "/ping", "/metrics"})
MIN_READ_RATE = 1024
"""Bytes a second that a client must read of its reply, over the seconds of `Wait.REPLY` or `Wait.END`."""


class Wait(enum.Enum):
    """The event that a connection waits for."""

    HEADERS = "the rest of a request's headers, or the first request"
    NEXT = "the first byte of a further request"
    REPLY = "the application's reply"
    REST = "the rest of a body whose reply is sent"
    END = "the client's reading of the last bytes"


SECONDS = {Wait.HEADERS: 10.0, Wait.NEXT: 5.0, Wait.REPLY: 30.0, Wait.REST: 10.0, Wait.END: 30.0}
"""How long each wait may last; REPLY and END go on as long as the client reads."""

TABLE = {
    (h11.IDLE, h11.IDLE): Wait.HEADERS,
    (h11.SEND_BODY, h11.SEND_RESPONSE): Wait.REPLY,
    (h11.SEND_BODY, h11.SEND_BODY): Wait.REPLY,
    (h11.SEND_BODY, h11.DONE): Wait.REST,
    (h11.DONE, h11.SEND_RESPONSE): Wait.REPLY,
    (h11.DONE, h11.SEND_BODY): Wait.REPLY,
    (h11.MUST_CLOSE, h11.SEND_RESPONSE): Wait.REPLY,
    (h11.MUST_CLOSE, h11.SEND_BODY): Wait.REPLY,
    (MIGHT_SWITCH_PROTOCOL, h11.SEND_RESPONSE): Wait.REPLY,
}
"""The wait in a pair of states, the client's and the server's; END in all others. After a request, HEADERS without a
byte is NEXT."""

_ERRORS = {
    400: ("bad_http", f"this is no well-formed HTTP request; {RULES}"),
    408: ("headers_timeout", f"the headers did not come within {SECONDS[Wait.HEADERS]:g} seconds"),
    431: ("headers_too_large", "the headers are too large"),
    501: ("bad_http", "this transfer-encoding is not supported"),
    503: ("too_many_connections", "too many connections are open"),
}
# Bytes of a client that has shown no key are not logged: they could fill the log.
_LOGGER = logging.getLogger("uvicorn.error.connection")
_LOGGER.setLevel(logging.ERROR)


def max_connections() -> int:
    """Return how many connections may be open, by the limit on open files, with all else that is open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - SPARE_FILES, soft // 2)


class Peers:
    """The open connections of one server: their number for each address, and the reserved ones, the oldest first.

    `most` bounds the connections of one address (an IPv4 address or an IPv6 network of 64 bits); None for half of all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.counts: Counter[str] = Counter()
        self.reserved: dict[Connection, None] = {}

    def is_full(self, peer: str, num_open: int, descriptor: int) -> bool:
        """Return whether a connection of `peer`, counted already, must be a reserved one.

        The system gives out the lowest number that is free. So `descriptor`, the connection's, counts what is open in
        this process, the engines' sockets and the storage's files too."""
        total = max_connections()
        most = total // 2 if self._most is None else self._most
        free = total - self._num_reserved()
        return num_open - len(self.reserved) > free or descriptor >= free or self.counts[peer] > most

    def reserve(self, connection: Connection) -> bool:
        """Reserve a connection, in place of the oldest reserved one that awaits no reply. Return False if all await
        one."""
        if len(self.reserved) >= self._num_reserved():
            idle = next((each for each in self.reserved if each.wait is not Wait.REPLY), None)
            if idle is None:
                return False
            del self.reserved[idle]
            idle.transport.abort()
        self.reserved[connection] = None
        return True

    @staticmethod
    def _num_reserved() -> int:
        return min(RESERVED, max_connections() // 4)


class _ProbesOnly:
    """Passes probes to the application and refuses all other calls; closes the connection in either case."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        app = self._app if scope["path"] in PROBES else error_response(CallError(503, *_ERRORS[503]))
        await app(scope, receive, closing)


class Connection(H11Protocol):
    """One client's HTTP connection."""

    def __init__(self, peers: Peers, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOGGER
        self.wait: Wait | None = None
        self._peers = peers
        self._peer = ""
        self._buffer = self.conn._receive_buffer = StrictBuffer()
        self._timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0

    @classmethod
    def protocol(cls, most_per_peer: int | None) -> Callable[..., Connection]:
        """Return the factory of one server's connections, for uvicorn; see `Peers`."""
        return functools.partial(cls, Peers(most_per_peer))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        read_small(transport)
        self._start(Wait.HEADERS)
        self._peer = peer_of(self.client[0]) if self.client else ""
        self._peers.counts[self._peer] += 1
        peer = transport.get_extra_info("socket")
        if self._peers.is_full(self._peer, len(self.connections), -1 if peer is None else peer.fileno()):
            if self._peers.reserve(self):
                self.app = _ProbesOnly(self.app)
            else:
                self.refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.wait = None
        self._peers.reserved.pop(self, None)
        self._peers.counts[self._peer] -= 1
        if not self._peers.counts[self._peer]:
            del self._peers.counts[self._peer]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._review()

    def eof_received(self) -> None:
        self._close()
        self._review()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._review()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.wait is Wait.REPLY:
            # From here on the client must read.
            self._start(Wait.REPLY)

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()
        if self.transport.is_closing() and self.transport.get_extra_info("ssl_object") and not self._unsent():
            # The end was sent. An idle client may never send its own, for which asyncio would wait.
            self.transport.abort()
        self._review()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.refuse(hint if hint in _ERRORS else 400)

    def refuse(self, status: int) -> None:
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
        if self.cycle is not None:
            # A call that has begun has no client any more, and must not reply.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._start(Wait.END)

    def _review(self) -> None:
        """Arm the timer of the present wait; a wait that goes on keeps its timer."""
        wait = TABLE.get((self.conn.their_state, self.conn.our_state), Wait.END)
        if self.transport.is_closing():
            wait = Wait.END
        elif wait is Wait.HEADERS and self.cycle is not None and not self._buffer:
            wait = Wait.NEXT
        if self.wait not in (wait, None):
            self._start(wait)

    def _start(self, wait: Wait) -> None:
        self._stop()
        self.wait = wait
        if wait is Wait.END:
            self._close()
        self._num_unsent = self._unsent()
        self._timer = self.loop.call_later(SECONDS[wait], self._on_time)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        wait = self.wait
        if wait is Wait.HEADERS:
            self.refuse(408)
        elif wait in (Wait.NEXT, Wait.REST):
            self._start(Wait.END)
        elif self.transport.is_closing() is (wait is Wait.END) and self._is_unread():
            self.transport.abort()
        else:
            self._start(Wait.END if self.transport.is_closing() else Wait.REPLY)

    def _is_unread(self) -> bool:
        """Return whether the client has read too little since the timer was armed."""
        if not (self.transport.is_closing() or self.flow.write_paused):
            return False
        return self._num_unsent - self._unsent() < MIN_READ_RATE * SECONDS[Wait.END]

    def _close(self) -> None:
        # A second time, a transport of TLS would forget what it still has to send.
        if not self.transport.is_closing():
            self.transport.close()

    def _unsent(self) -> int:
        """Return how many bytes wait for the client, in this process and in the system."""
        if getattr(self.transport, "_ssl_protocol", self) is None:
            return 0  # closed twice, by uvicorn; asyncio ends it in the time of a shutdown
        size = self.transport.get_write_buffer_size()
        peer = self.transport.get_extra_info("socket")
        if not size or peer is None:
            return size
        return size + int.from_bytes(fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
