"""`Acceptor`: takes connections from a listening socket, a few at a time, and pauses while there is no room (S-19).

asyncio's servers take all connections that wait before one of them can be counted and refused; thousands may wait, and
each one for which there is no descriptor is a traceback in the log. Knows no HTTP. Called by `serve.process`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger("headrace.server")

TURN = 8
"""Connections that are taken and not yet known to their protocol, at most."""
PAUSE_S = 0.1
REPORT_S = 1.0
"""Seconds between two lines of the log about connections that were not taken."""
LOST = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH})
"""Errors of one connection, which has ended; the next one may be taken at once."""
MAX_RAISED_FILES = 2**16
"""Open files that the limit is raised to: each connection may take memory."""


def raise_file_limit() -> None:
    """Raise the limit on open files as far as this process may, but not beyond `MAX_RAISED_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_RAISED_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_RAISED_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


HANDSHAKE_S = 10.0
"""Seconds that a handshake of TLS may take, as a request's headers may."""
HANDSHAKES = 512
"""Handshakes that are open at once, at most; a client that comes then is closed out."""
HANDSHAKES_OF_PEER = 64
"""Of them those of one address (of an IPv6 network of 64 bits)."""


def peer_of(host: str) -> str:
    """Return the address or network under which the connections of a client are counted."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


class Acceptor:
    """One listening socket, which does not block, with the face of an asyncio server. `make` returns the protocol of a
    new connection. With a `context` a connection is known to its protocol when its handshake is done; the bounds on
    handshakes are those on clients that begin none."""

    def __init__(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None = None
    ) -> None:
        self._listener, self._make, self._context = listener, make, context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        # Open handshakes, by the clients' addresses.
        self._handshakes: Counter[str] = Counter()
        self._pause: asyncio.TimerHandle | None = None
        # Errors since the last line of the log, by their texts.
        self._errors: Counter[str] = Counter()
        self._report: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Take no more connections. The socket stays open."""
        self._loop.remove_reader(self._listener)
        for timer in (self._pause, self._report):
            if timer is not None:
                timer.cancel()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the connections."""
        return self._loop

    async def wait_closed(self) -> None:
        """Wait until the connections that were taken are known to their protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._take)

    def _take(self) -> None:
        for _ in range(TURN - (0 if self._context else len(self._opening))):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._note(error)
                if error.errno in LOST:
                    continue
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
                return
            if self._context is None:
                task = self._loop.create_task(self._open(sock))
            else:
                peer = peer_of(address[0])
                if len(self._opening) >= HANDSHAKES or self._handshakes[peer] >= HANDSHAKES_OF_PEER:
                    sock.close()
                    continue
                task = self._loop.create_task(self._open_securely(sock, self._context, peer))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, sock)
        except OSError as error:
            sock.close()
            self._note(error)

    async def _open_securely(self, sock: socket.socket, context: ssl.SSLContext, peer: str) -> None:
        self._handshakes[peer] += 1
        try:
            await self._loop.connect_accepted_socket(self._make, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_S)
        except OSError as error:
            # A client that speaks no TLS, or does not trust the certificate: it may fill no log.
            sock.close()
            logger.debug("a handshake failed: %s", error)
        finally:
            self._handshakes[peer] -= 1
            if not self._handshakes[peer]:
                del self._handshakes[peer]

    def _note(self, error: OSError) -> None:
        """Log the error at once, or with those of the next second."""
        self._errors[error.strerror or type(error).__name__] += 1
        if self._report is None:
            self._write()

    def _write(self) -> None:
        self._report = None
        if self._errors:
            texts = ", ".join(f"{text} ({num} times)" for text, num in self._errors.items())
            self._errors.clear()
            logger.warning("connections were not taken: %s", texts)
            self._report = self._loop.call_later(REPORT_S, self._write)
