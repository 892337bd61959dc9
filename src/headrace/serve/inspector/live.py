"""`GET /inspect/live`: the engine at work as a stream of events, for `headrace top`.

Where keys are set it needs an administrator's. The first event is the state, the second a snapshot of the blocks. With
`follow=true` each step follows, and the state each second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette

from headrace.engine.client import EngineClient
from headrace.insight.explainer import Explainer
from headrace.insight.live import MAX_VIEWERS, Feed, Viewer
from headrace.insight.state import State, state_of
from headrace.protocol.errors import QueueFullError, RequestError
from headrace.serve import routing
from headrace.serve.errors import CallError

INTERVAL_S = 1 / 40
STATE_S = 1.0


class LiveEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of these: `state` as in `insight.state`, with `overload`, the server's; `snapshot` and `step` as in
    `insight.live`."""

    state: State | None = None
    overload: dict[str, Any] | None = None
    snapshot: dict[str, Any] | None = None
    step: dict[str, Any] | None = None


class Inspected(Protocol):
    """A model that runs."""

    client: EngineClient
    explainer: Explainer

    @property
    def drafter(self) -> str: ...


class Source:
    """The source of the events that all viewers read. The state is encoded once for all of them. `running` returns the
    loaded models, `overload` the server's overload."""

    def __init__(
        self, model: Inspected, running: Callable[[], Iterable[Inspected]], overload: Callable[[], dict[str, Any]]
    ) -> None:
        self.client = client = model.client
        self._drafter = model.drafter
        self._explainer = explainer = model.explainer
        self._running, self._overload = running, overload
        self.feed = Feed(client.watch)
        explainer.show(self.feed)
        self._state, self._time = b"", 0.0

    @property
    def is_open(self) -> bool:
        """Whether the engine goes on: its model is loaded, and the server does not end."""
        client = self.client
        is_loaded = any(model.client is client for model in self._running())
        return is_loaded and not (client.is_draining or client.dead.is_set())

    def state(self) -> bytes:
        """Return the state as JSON, at most half of `STATE_S` old."""
        now = time.monotonic()
        if now - self._time > STATE_S / 2:
            machine = self._explainer.calls.machine
            state = state_of(self.client, self._explainer.lives, machine, now, self._drafter)
            self._state, self._time = msgspec.json.encode(LiveEvent(state=state, overload=self._overload())), now
        return self._state


class View:
    """The answer of a `LiveStream`: a viewer who is there until `close`."""

    id = ""
    size = 0

    def __init__(self, source: Source) -> None:
        self.source = source
        self.viewer: Viewer | None = source.feed.subscribe()

    def close(self) -> None:
        viewer, self.viewer = self.viewer, None
        if viewer is not None:
            self.source.feed.unsubscribe(viewer)


class LiveStream(routing.Readable):
    """A stream that ends with the server, or, unless it `follows`, after the first events."""

    def __init__(self, view: View, follows: bool) -> None:
        super().__init__(view, stream=True)
        self._follows = follows

    async def whole(self) -> None:
        raise NotImplementedError("a live stream is never whole")

    async def events(self) -> AsyncIterator[bytes]:
        source, due = self.answer.source, 0.0
        while self.answer.viewer is not None and source.is_open:
            messages = []
            if (now := time.monotonic()) >= due:
                messages, due = [source.state()], now + STATE_S
            messages += self.answer.viewer.take()
            if messages:
                yield b"".join(b"data: " + message + b"\n\n" for message in messages)
            if not self._follows:
                return
            await asyncio.sleep(INTERVAL_S)


def add_routes(
    app: Starlette,
    running: Callable[[], Iterable[Inspected]],
    chosen: Callable[[], Inspected],
    overload: Callable[[], dict[str, Any]],
) -> None:
    """Add the route. `running` returns the models that are loaded, `chosen` the one to watch, `overload` the server's
    overload."""
    sources: list[Source] = []
    app.state.inspected = sources

    def live(query: Mapping[str, str]) -> LiveStream:
        """The engine at work: its state and blocks; with `follow=true` then the state each second, and each step."""
        follow = query.get("follow", "false")
        if follow not in ("true", "false"):
            raise RequestError("follow", follow, "true or false")
        model = chosen()
        if not sources or sources[0].client is not model.client:
            sources[:] = [Source(model, running, overload)]
        try:
            return LiveStream(View(sources[0]), follow == "true")
        except QueueFullError as error:
            message = f"at most {MAX_VIEWERS} viewers watch at once"
            raise CallError(503, "too_many_viewers", message, {"retry-after": "1"}) from error

    routing.add(
        app,
        "/inspect/live",
        live,
        ("GET",),
        media_type=routing.EVENT_STREAM,
        streams=routing.EVENT_STREAM,
        chunks=(LiveEvent,),
        summary="The engine at work, live.",
        query=("follow",),
    )
