"""`Door`: takes connections on a port, and serves clients that have proven themselves; `connect` is the client's side.

A faulty connection is one line of the log, and harms no other. Knows no messages but the handshake's. Called by
`fleet.remote` and `parallel.hosts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headrace.protocol import frames
from headrace.secure import handshake
from headrace.secure.channel import CLOSE_S, pack
from headrace.secure.credentials import Credentials
from headrace.secure.handshake import HandshakeError, ProtocolVersion, Refusal, Timeouts, Welcome

logger = logging.getLogger("headrace.engine")

MAX_PENDING = 32
"""Connections without a proof at once; for a further one the oldest is dropped."""


class Peer(NamedTuple):
    """A connection whose client has proven itself, and waits for its `Welcome`. `client`: who it says it is."""

    name: str
    client: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    proof: bytes

    def welcome(self, terms: bytes = b"") -> None:
        self.writer.write(pack(Welcome(self.proof, terms)))

    def refuse(self, reason: Refusal, text: str = "") -> HandshakeError:
        """Send a refusal, and return its error."""
        return handshake.refuse(self.writer, reason, text)


class Door:
    """A port. `serve` is called for each peer, and returns when its connection has ended.

    It may raise `HandshakeError` for a peer that it refuses.
    """

    def __init__(
        self,
        credentials: Credentials,
        protocol: ProtocolVersion,
        timeouts: Timeouts,
        serve: Callable[[Peer], Awaitable[None]],
    ) -> None:
        self._credentials, self._protocol, self._timeouts, self._serve = credentials, protocol, timeouts, serve
        self._pending: dict[asyncio.Task[None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Connections without a proof."""
        return len(self._pending)

    async def accept(self, listener: socket.socket) -> None:
        """Take connections until it is cancelled, which ends all of them."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    sock, address = await loop.sock_accept(listener)
                except ConnectionAbortedError:  # its client has left
                    continue
                except OSError as error:  # such as no more files; the next one may be taken
                    logger.error("a connection was not taken: %s", error)
                    await asyncio.sleep(1.0)
                    continue
                if len(self._pending) >= MAX_PENDING:
                    oldest = next(iter(self._pending))
                    del self._pending[oldest]
                    oldest.cancel("too many connections without a proof")
                task = asyncio.create_task(self._meet(sock, f"{address[0]} port {address[1]}"))
                self._pending[task] = None
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                # `sock_accept` does not yield while connections wait, and those that are dropped must be closed.
                await asyncio.sleep(0)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _meet(self, sock: socket.socket, name: str) -> None:
        """Serve a connection from its first byte to its end."""
        task = asyncio.current_task()
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._secure(sock)
            async with asyncio.timeout(self._timeouts.proof):
                client, proof = await handshake.admit(reader, writer, self._credentials, self._protocol)
            self._pending.pop(task, None)  # type: ignore[arg-type]
            await self._serve(Peer(name, client, reader, writer, proof))
        except HandshakeError as error:
            logger.warning("refused %s: %s", name, error)
            if writer is not None:
                # The refusal is to arrive.
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except TimeoutError:
            logger.warning("refused %s: it was silent before its proof", name)
        except OSError as error:
            logger.warning("refused %s: %s", name, str(error) or type(error).__name__)
        except asyncio.CancelledError as error:
            if error.args:
                logger.warning("refused %s: %s", name, error)
            if writer is not None:
                writer.transport.abort()
            raise
        except Exception:  # a defect: the others go on
            logger.exception("the connection of %s failed", name)
        finally:
            self._pending.pop(task, None)  # type: ignore[arg-type]
            if writer is None:
                sock.close()
            elif not writer.is_closing():
                writer.transport.abort()

    async def _secure(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=frames.READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._credentials.context,
            ssl_handshake_timeout=self._timeouts.tls,
            ssl_shutdown_timeout=CLOSE_S,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class Server(NamedTuple):
    """The server of a client: `what` it is, for errors, its address, and the name that its certificate must have."""

    what: str
    host: str
    port: int
    certified_name: str


async def connect(
    server: Server, credentials: Credentials, protocol: ProtocolVersion, timeouts: Timeouts, client: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Connect to a server, and prove oneself as `client`. Returns the connection, and the terms of the welcome.

    Raises `HandshakeError`, or `OSError` (`TimeoutError`) for a server that is not there."""
    async with asyncio.timeout(timeouts.tls):
        reader, writer = await asyncio.open_connection(
            server.host,
            server.port,
            ssl=credentials.context,
            server_hostname=server.certified_name,
            ssl_shutdown_timeout=CLOSE_S,
        )
    try:
        async with asyncio.timeout(timeouts.proof):
            terms = await handshake.join(reader, writer, credentials, protocol, client, server.what)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer, terms
