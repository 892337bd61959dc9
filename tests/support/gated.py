"""A server in this event loop, without a socket, over engines whose starts can be held and which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from tests.support import fake

from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.library.model_folder import ModelFolder
from headrace.engine.links import InprocLink, OnLost, OnMessage
from headrace.engine.records.black_box import BlackBox
from headrace.fleet.engines.local import LocalFleet
from headrace.protocol import frames
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import EngineLostError
from headrace.protocol.step import EngineInfo
from headrace.serve import loading
from headrace.serve.app import create_app
from headrace.serve.lifespan import Lifespan
from headrace.serve.loading import ModelParts
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer


class GatedLink:
    """An engine on a thread, which loads when `gate` is open, and ends by `kill`."""

    in_process = True
    load_seconds = 0.0
    was_killed = False
    pid = None

    def __init__(self, build: Callable[[], EngineCore], gate: asyncio.Event) -> None:
        self.black_box: BlackBox | None = None
        self.adapters: dict[str, str] = {}
        self.gate = gate
        self._build = build
        self._inner: InprocLink | None = None
        self._on_lost: OnLost | None = None
        self._end = asyncio.Event()
        self._threads: list[InprocLink] = []

    async def start(self, on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
        self._end.clear()
        waits = [asyncio.ensure_future(each.wait()) for each in (self.gate, self._end)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if self._end.is_set():
            raise EngineLostError("the engine was killed while it loaded")
        inner = InprocLink(self._build)
        self._threads.append(inner)

        def take(message: frames.FromEngine) -> None:
            if self._inner is inner:
                on_message(message)

        self._inner = inner
        info = await inner.start(take, lambda reason: on_lost(reason) if self._inner is inner else None)
        if self._inner is not inner:
            raise EngineLostError("the engine was killed while it loaded")
        self._on_lost = on_lost
        return info

    def die(self) -> None:
        """End the engine as a SIGKILL does, also one that loads."""
        self.was_killed = True
        # Its thread ends with the link; nothing comes of it any more.
        self._inner = None
        on_lost, self._on_lost = self._on_lost, None
        self._end.set()
        if on_lost is not None:
            on_lost("killed")

    def post(self, message: frames.ToEngine) -> None:
        if self._inner is not None:
            self._inner.post(message)

    def usage(self) -> tuple[float, bool] | None:
        return None

    async def kill(self) -> None:
        self.die()

    async def close(self, at_once: bool = False) -> None:
        self._inner = self._on_lost = None
        self._end.set()
        threads, self._threads = self._threads, []
        for each in threads:
            await each.close()


class Server:
    """The application, a client that calls it, and the engines of its model, whose starts `gate` holds."""

    def __init__(self, app: Any, http: httpx.AsyncClient, client: EngineClient, gate: asyncio.Event) -> None:
        self.app, self.http, self.client, self.gate = app, http, client, gate
        self.lifespan: Lifespan = app.state.lifespan

    def kill(self) -> None:
        """End all engines as a SIGKILL does."""
        for replica in self.client.replicas:
            if isinstance(replica.link, GatedLink):
                replica.link.die()

    async def call(self, route: str, body: Any = None, seconds: float = 60.0, **more: Any) -> httpx.Response:
        """Call "METHOD /path". Raises `TimeoutError` for a reply that does not come."""
        method, path = route.split(" ")
        async with asyncio.timeout(seconds):
            return await self.http.request(method, path, json=body, **more)

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)


class GatedFleet(LocalFleet):
    """Two engines whose starts `gate` holds."""

    def __init__(self, gate: asyncio.Event, server: ServerConfig) -> None:
        self.gate = gate
        super().__init__(EngineConfig(model="fake"), server, [[], []])

    def _link(self, engine: EngineConfig, cpus: Sequence[int]) -> GatedLink:
        return GatedLink(lambda: fake.build(engine), self.gate)


def gated(gate: asyncio.Event) -> EngineClient:
    """A client of one engine whose starts `gate` holds."""
    return EngineClient(GatedLink(lambda: fake.build(EngineConfig(model="fake")), gate), max_restarts=1000)


@contextlib.asynccontextmanager
async def serving(
    tokenizer: Tokenizer, root: Path, is_open: bool = True, is_fleet: bool = False, **settings: Any
) -> AsyncIterator[Server]:
    """A server with a model that stays and the models folder `root`. On leaving it ends, within a minute."""
    gate = asyncio.Event()
    if is_open:
        gate.set()
    config = ServerConfig(
        log_stats_interval=0, models_dir=str(root), max_restarts=1000, crash_report_dir="", **settings
    )
    client = GatedFleet(gate, config) if is_fleet else gated(gate)
    parts = ModelParts(tokenizer, ChatTemplate.of(tokenizer), engine=EngineConfig(model=str(root / "tiny")))
    with mock.patch.object(loading, "ProcessClient", side_effect=lambda *_: gated(gate)):
        app = create_app(client, config, "fake", parts, ModelFolder(str(root)))
        async with contextlib.AsyncExitStack() as stack:
            life = app.state.lifespan.run(app)
            await life.__aenter__()
            transport = httpx.ASGITransport(app=app)
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
            try:
                yield Server(app, http, client, gate)
            finally:
                gate.set()
                async with asyncio.timeout(60):
                    await life.__aexit__(None, None, None)
