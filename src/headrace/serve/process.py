"""The server's process: its sockets, its signals, the order of its end, and its exit status.

uvicorn runs the connections; its start and end are logged here, in the server's own words. Knows no routes and no
model. Called by `serve.app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import uvicorn
from starlette.applications import Starlette

from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import HeadraceError
from headrace.serve import early_signals
from headrace.serve.early_signals import SIGNALS
from headrace.serve.gates.accept import Acceptor, raise_file_limit
from headrace.serve.gates.calls import hosts_of
from headrace.serve.gates.connection import Connection
from headrace.serve.reach import Reach, UnderPath

logger = logging.getLogger("headrace.server")

STREAM_END_S = 5.0
"""Seconds that a client has to read the last event of its stream after draining ends."""
LAST_TASKS_S = 1.0
"""Seconds that calls have to end after their connections were cut."""
BACKLOG = 2048
"""Connections that the system keeps until the server takes them."""
FAILED = 1
"""The exit status of a server that could not start, or whose engine died too often."""
FIRST_OF_SIGNALS = 128
"""Added to the number of the signal that ended a drain, as shells do."""


class ListenError(HeadraceError):
    """The server cannot listen at its address."""

    code = "listen_error"


class Life(Protocol):
    """The application's life, as `app.state.lifespan` has it.

    Attributes:
        draining: whether the probes reply that the server drains.
        failure: the cause of the server's end, if no signal ended it.
        ended: set when the server should end by itself.
        is_cut: whether the engine must end in mid-step.
        url: the server's address.
    """

    draining: bool
    failure: BaseException | None
    ended: asyncio.Event
    is_cut: bool
    url: str

    @property
    def num_open(self) -> int:
        """How many requests are open."""
        ...

    def drain(self, seconds: float) -> None: ...


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at every address of `host`, or of several with commas. Port 0 is any free one, the
    same for all of them.

    Raises `ListenError`, which names host, port and a remedy.
    """
    sockets: list[socket.socket] = []
    try:
        places = [
            place
            for one_host in hosts_of(host)
            for place in socket.getaddrinfo(one_host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ]
        for family, *_, address in dict.fromkeys(places):
            one = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], sockets[0].getsockname()[1] if sockets[1:] else port, *address[2:]))
            one.listen(BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in sockets:
            one.close()
        raise ListenError(_advice(error, host, port)) from error
    return sockets


def _advice(error: OSError, host: str, port: int) -> str:
    place = f"can not listen on host {host}, port {port}: "
    if isinstance(error, socket.gaierror):
        return place + "no such host; set --host to an address of this machine, or to 0.0.0.0 for all of them"
    if error.errno == errno.EADDRINUSE:
        return place + f"the port is in use; choose another with --port, or end what `ss -ltnp sport = :{port}` shows"
    if error.errno == errno.EADDRNOTAVAIL:
        return place + "this machine does not have that address; set --host to one that it has, or to 0.0.0.0 for all"
    if error.errno in (errno.EACCES, errno.EPERM):
        return place + "this user may not; choose a port from 1024 with --port"
    return place + (error.strerror or str(error))


def url_of(host: str, port: int, reach: Reach = Reach()) -> str:
    """Return the address that a client on this machine uses."""
    host = hosts_of(host)[0]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{reach.scheme}://{f'[{name}]' if ':' in name else name}:{port}{reach.path}"


class Server(uvicorn.Server):
    """A uvicorn server that drains after a signal; uvicorn's own raises the signal again after the drain. Its
    connections come through `Acceptor`, by TLS where there is a `context`.

    After SIGTERM it serves on for `delay` seconds, while its probes fail: a load balancer needs that time to notice. A
    further signal ends the delay, one in the drain ends the drain, and one more the process.

    Attributes:
        last_signal: the signal that cut the drain short; None if none came.
        takes_signals: whether signals to the process end the server. Otherwise only `end` does.
    """

    takes_signals = True

    def __init__(
        self,
        config: uvicorn.Config,
        life: Life,
        delay: float,
        drain_seconds: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(config)
        self._context = context
        self.last_signal: signal.Signals | None = None
        self._life = life
        self._delay = delay
        self._drain_seconds = drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        loop = asyncio.get_running_loop()
        # A signal comes while some call is served; log lines about the signal must not bear the call's id.
        surroundings = contextvars.copy_context()

        def on_signal(number: int, frame: Any) -> None:
            # Not the loop's own handlers: with those, a signal after the loop's end would be a traceback.
            if loop.is_closed():
                _exit(FIRST_OF_SIGNALS + number)
            loop.call_soon_threadsafe(self._on_signal, signal.Signals(number), context=surroundings)

        for name in SIGNALS if self.takes_signals else ():
            signal.signal(name, on_signal)
        yield

    def end(self) -> None:
        """End as after a SIGTERM, without its delay."""
        self._end(signal.SIGTERM)

    def _on_signal(self, name: signal.Signals) -> None:
        if self.force_exit:
            _exit(FIRST_OF_SIGNALS + name)
        elif self.should_exit:
            self.force_exit = self._life.is_cut = True
            self.last_signal = name
            logger.warning("%s: ending now; open calls: %d", name.name, self._life.num_open)
            self._hang_up()
        elif self._delay and name == signal.SIGTERM and not self._life.draining:
            self._life.draining = True
            logger.info("%s: the probes fail, and calls are accepted for %g s", name.name, self._delay)
            asyncio.get_running_loop().call_later(self._delay, self._end, name)
        else:
            self._end(name)

    def _end(self, name: signal.Signals) -> None:
        if self.should_exit:
            return
        self.should_exit = True
        num_open = self._life.num_open
        if num_open:
            text = "%s: open calls: %d; they have %g s to end, and a further signal ends them now"
            logger.info(text, name.name, num_open, self._drain_seconds)
        else:
            logger.info("%s: ending", name.name)
        self._life.drain(self._drain_seconds)
        # The last events have been sent by then. A call whose client does not read ends as if the client had left.
        asyncio.get_running_loop().call_later(self._drain_seconds + STREAM_END_S, self._hang_up)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(FAILED)
        make = functools.partial(
            cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [Acceptor(each, make, self._context) for each in sockets or ()]  # type: ignore[misc]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn skips the end of the lifespan here, and each task that it cancels leaves a traceback in the log.
            await self.lifespan.shutdown()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=LAST_TASKS_S)


def _exit(status: int) -> None:
    """End the process at once, after the last lines of the log. The engine's process ends with it."""
    logging.shutdown()
    os._exit(status)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal end the process at once with status 0 until `Server` takes the signals: nothing is open that would
    have to be drained. So does a signal that `early_signals` holds."""

    def end(number: int) -> None:
        logger.info("%s: ending; the server had not begun", signal.Signals(number).name)
        _exit(0)

    def on_signal(number: int, frame: Any) -> None:
        # On a thread: the code that the signal came upon may hold a lock of the log.
        threading.Thread(target=end, args=(number,), daemon=True).start()

    before = {name: signal.signal(name, on_signal) for name in SIGNALS}
    if early_signals.pending:
        end(early_signals.pending[0])
    try:
        yield
    finally:
        for name, handler in before.items():
            if signal.getsignal(name) is on_signal:
                signal.signal(name, handler)


def run(
    app: Starlette,
    server: ServerConfig,
    sockets: list[socket.socket] | None = None,
    reach: Reach = Reach(),
) -> int:
    """Serve `app` until a signal comes: drain, stop the engine, return the exit status.

    `sockets` come from `listen`; without them the server listens by the config, and may raise `ListenError`. Raises
    `RequestError` for a file of `reach`."""
    raise_file_limit()
    sockets = listen(server.host, server.port) if sockets is None else sockets
    uvicorn_server = server_of(app, server, sockets, reach)
    # Modules, routes and the tokenizer live as long as this process. A garbage collection would walk them all, and
    # delay every call by a tenth of a second.
    gc.collect()
    gc.freeze()
    return asyncio.run(serve(uvicorn_server, app.state.lifespan, sockets))


def server_of(
    app: Starlette,
    server: ServerConfig,
    sockets: list[socket.socket],
    reach: Reach = Reach(),
) -> Server:
    """Return the server of `app` behind `sockets`, which `serve` runs. Raises `RequestError` for a file of `reach`."""
    config = uvicorn.Config(
        UnderPath(app, reach.path) if reach.path else app,
        http=Connection.protocol(server.max_connections_per_peer),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(server.shutdown_timeout + 2 * STREAM_END_S),
    )
    life = app.state.lifespan
    life.url = url_of(server.host, sockets[0].getsockname()[1], reach)
    return Server(config, life, server.shutdown_delay, server.shutdown_timeout, reach.context())


async def serve(server: Server, life: Life, sockets: list[socket.socket]) -> int:
    """Serve until the server ends, by a signal, by `end`, or because its engine is dead. Returns the exit status."""

    async def stop_when_dead() -> None:
        await life.ended.wait()
        server.should_exit = True

    watch = asyncio.create_task(stop_when_dead())
    try:
        await server.serve(sockets)
    finally:
        watch.cancel()
    if life.failure is not None or not server.started:
        return FAILED
    if server.last_signal is not None:
        return FIRST_OF_SIGNALS + server.last_signal
    logger.info("ended")
    return 0
