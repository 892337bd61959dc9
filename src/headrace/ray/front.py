"""`FrontActor`: headrace's own server as a replica of Ray Serve, with a fleet of the engines that announce themselves.

Clients come to its own port, and to none of Ray's. Made by Ray Serve, with the plan that `deploy` binds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from hashlib import blake2b

import msgspec
import ray

from headrace import hub
from headrace.engine import logs
from headrace.engine.client import EngineClient
from headrace.fleet.engines.client import Fleet
from headrace.fleet.remote.link import RemoteLink
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import HeadraceError
from headrace.ray.identity import ENGINE_NAME
from headrace.ray.plans import FrontPlan
from headrace.ray.roster import Roster
from headrace.ray.scaling import Demand
from headrace.serve import process
from headrace.serve.app import make_app

logger = logging.getLogger("headrace.server")

MAX_RESTARTS = 2**31
"""Times that a connection may be lost: Ray Serve decides when an engine is given up."""
PORT_S = 30.0
"""Seconds that a front waits for its port, which the front before it may still hold."""


class FrontActor:
    """The front of a plan (`FrontPlan` as msgpack)."""

    async def __init__(self, plan: bytes) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._plan = msgspec.msgpack.decode(plan, type=FrontPlan)
        engine, server = self._plan.engine, self._plan.server
        logs.set_up(server.uvicorn_log_level, server.log_format)
        self._sockets = await _listen(server.host, server.port)
        app = make_app(engine, server, make_client=self._make_client)
        self._life = app.state.lifespan
        self._server = process.server_of(app, server, self._sockets)
        self._server.takes_signals = False
        self._serving = asyncio.create_task(process.serve(self._server, self._life, self._sockets))

    def _make_client(self, engine: EngineConfig, server: ServerConfig) -> EngineClient:
        credentials = self._plan.identity.credentials()
        weights = functools.cache(lambda: hub.weights_digest(engine.model, engine.revision))
        secret = blake2b(b"prefix keys", key=credentials.secret[: blake2b.MAX_KEY_SIZE], digest_size=32).digest()
        fleet = Fleet(
            [],
            router=server.router,
            secret=secret,
            max_num_queued_reqs=server.max_num_queued_reqs,
            max_num_queued_tokens=server.max_num_queued_tokens,
            max_restarts=MAX_RESTARTS,
            watchdog_timeout=server.watchdog_timeout,
        )
        self._roster = Roster(
            fleet, lambda host, port: RemoteLink(host, port, credentials, weights, certified_name=ENGINE_NAME)
        )
        return fleet

    async def announce(self, model: str, name: str, host: str, port: int) -> bytes:
        """Use the engine `name` of a model at an address. Returns the `Demand` of the model as msgpack."""
        now = time.monotonic()
        self._check(model)
        self._roster.announce(name, host, port, now)
        return msgspec.msgpack.encode(self._roster.demand(now))

    async def withdraw(self, model: str, name: str) -> bytes:
        """Drain the engine `name`. Returns a `Demand` with no replicas as soon as it is not needed any more."""
        self._check(model)
        return msgspec.msgpack.encode(Demand(num_replicas=int(self._roster.withdraw(name))))

    def _check(self, model: str) -> None:
        if model != self._plan.model:
            raise HeadraceError(f"this front serves {self._plan.model}, not {model}")

    async def status(self) -> dict[str, str]:
        """Return the front's status as its probes have it, and its address."""
        host, port = self._sockets[0].getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = ray.util.get_node_ip_address()
        return {"status": self._life.status(), "url": process.url_of(host, port)}

    async def check_health(self) -> None:
        """Raise if the server has ended; Ray Serve then replaces this actor."""
        if self._serving.done():
            raise HeadraceError(f"the front has ended: {self._life.failure}")

    async def __del__(self) -> None:
        """Refuse new calls, let open ones end, and end."""
        serving = getattr(self, "_serving", None)
        if serving is None:
            return
        self._server.end()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        for each in self._sockets:
            each.close()


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets on the address, as soon as it is free. Raises `ListenError`."""
    end = time.monotonic() + PORT_S
    while True:
        try:
            return process.listen(host, port)
        except process.ListenError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.2)
