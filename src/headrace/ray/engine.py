"""`EngineActor`: an engine as a replica of Ray Serve. It listens on its own port, as `headrace engine` does, and
announces its address to the front each second, until it goes.

Knows no requests: they come over its own connection. Made by Ray Serve, with the plan that `deploy` binds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from secrets import token_hex
from typing import Any

import msgspec
import ray
from ray import serve

from headrace import hub
from headrace.engine import logs
from headrace.engine.links import ProcessLink
from headrace.fleet.remote.server import EngineServer
from headrace.protocol.errors import HeadraceError
from headrace.ray.plans import ANNOUNCE_S, FRONT, EnginePlan
from headrace.ray.scaling import Demand, stats

logger = logging.getLogger("headrace.engine")

CALL_S = 10.0
"""Seconds that an answer of the front may take."""


class EngineActor:
    """An engine of a plan (`EnginePlan` as msgpack)."""

    async def __init__(self, plan: bytes) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        logs.set_up("info")
        self._plan = msgspec.msgpack.decode(plan, type=EnginePlan)
        self._name = token_hex(8)
        self._demand = Demand()
        self._trouble = ""
        self._front: Any = None
        self._host = ray.util.get_node_ip_address()
        self._listener = _listener(self._host, self._plan.ports)
        config = self._plan.config
        server = EngineServer(
            ProcessLink(config, log_level="info"),
            self._plan.identity.credentials(),
            lambda: hub.weights_digest(config.model, config.revision),
        )
        self._serving = asyncio.create_task(server.serve(self._listener))
        loaded = asyncio.create_task(server.until_loaded())
        await asyncio.wait({self._serving, loaded}, return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if self._serving.done():
            # Raises the error that kept it from loading.
            await self._serving
        self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        while True:
            try:
                self._demand = await self._call("announce", host, port)
                self._trouble = ""
            except Exception as error:  # whatever Ray raises: the next call may succeed
                text = str(error) or type(error).__name__
                if text != self._trouble:
                    logger.warning("the front of %s does not answer: %s", self._plan.model, text[:300])
                self._trouble, self._front = text, None
            await asyncio.sleep(ANNOUNCE_S)

    async def _call(self, method: str, *arguments: Any) -> Demand:
        """Call the front with this engine's name."""
        if self._front is None:
            self._front = serve.get_deployment_handle(FRONT, self._plan.front_app)
        async with asyncio.timeout(CALL_S):
            body = await getattr(self._front, method).remote(self._plan.model, self._name, *arguments)
        return msgspec.msgpack.decode(body, type=Demand)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures by which Ray Serve's policy decides (`scaling`)."""
        return stats(self._demand, self._plan.target_seconds)

    async def check_health(self) -> None:
        """Raise the error that ended the engine's server; Ray Serve then replaces this actor."""
        if self._serving.done():
            await self._serving
            raise HeadraceError("the engine's server has ended")

    async def __del__(self) -> None:
        """Let others go on with the streams, and end."""
        announcing = getattr(self, "_announcing", None)
        if announcing is None:
            return
        announcing.cancel()
        try:
            await self._call_until_gone()
        except Exception as error:  # such as a front that is gone
            logger.warning("the front could not release this engine: %s", str(error)[:300] or type(error).__name__)
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, HeadraceError):
            await self._serving
        self._listener.close()

    async def _call_until_gone(self) -> None:
        """Ask the front to drain this engine until it has no requests there."""
        while (await self._call("withdraw")).num_replicas:
            await asyncio.sleep(ANNOUNCE_S / 4)


def _listener(host: str, ports: list[int]) -> socket.socket:
    """Return a socket that listens on a port of the range, any free one without a range. Raises `HeadraceError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(ports[0], ports[1] + 1) if ports else [0]:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
    raise HeadraceError(f"no port of {host} is free for an engine among {ports or 'all'}: {reason}")
