"""The data of the inspector's views that are not live: `GET /inspect/requests`, `/cache`, `/numbers` and `/limits`, and
`POST /inspect/recording`; and `POST /inspect/hold`, which lets the engine wait between two steps. Where keys are set
they need an administrator's.

Work that takes numpy or much processor time runs in separate processes (`quantize.samples`, `insight.replay_worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.cache_tree import CacheTree, ReadCache
from headrace.engine.holding import NOT_HELD, HoldSteps
from headrace.insight import summaries
from headrace.insight.explainer import name_of
from headrace.insight.limits import Limits, Machine, limits_of
from headrace.insight.numbers import Names, Sample, SampleReply
from headrace.insight.replay_worker import Replay, Replayed
from headrace.insight.summaries import Cache, Requests
from headrace.protocol.errors import ChildFailedError, RequestError
from headrace.serve import routing
from headrace.serve.call.parsing import Body, convert
from headrace.serve.errors import CallError
from headrace.serve.gates.limits import body_pieces
from headrace.serve.loading import RunningModel, RunningModels
from headrace.serve.storage.space import RESERVE_BYTES, Room, storing, sweep
from headrace.text.bounded import BoundedProcess

RECORDING = "headrace-recording-"
"""The beginning of the names of recordings that are replayed."""
MAX_RECORDING_BYTES = 64 * 2**20
REPLAY_CPU_S, SAMPLE_CPU_S = 60.0, 20.0
WATCH_S = 0.02
MAX_HELD_STEPS = 10_000
FLOATS = ("F32", "F16", "BF16")


class HoldRequest(Body):
    """`num_steps` more steps are computed before the engine waits; without them it goes on."""

    num_steps: int | None = None


class Held(msgspec.Struct, kw_only=True):
    """The reply: whether the engine is held, and the steps that it will compute before it waits."""

    is_held: bool
    num_steps: int


class Inspection:
    """The state of the routes: the models, and the processes that do the long work. `check_order` raises an error in a
    state of the server in which no engine may be held."""

    def __init__(self, models: RunningModels, check_order: Callable[[], None] = lambda: None) -> None:
        self._models = models
        self._check_order = check_order
        self._samples = BoundedProcess("headrace.quantize.samples", SAMPLE_CPU_S)
        self._replays = BoundedProcess("headrace.insight.replay_worker", REPLAY_CPU_S)
        self._machine = Machine()
        self._measuring: asyncio.Task[None] | None = None
        sweep(Path(tempfile.gettempdir()).glob(f"{RECORDING}*"))

    @property
    def model(self) -> RunningModel:
        """The model that is inspected: the first one, which is the server's own where it has one. Raises `CallError` if
        there is none."""
        running = self._models.running
        if not running:
            raise CallError(503, "no_model", "no model is loaded", {"retry-after": "1"})
        running[0].explainer.calls.machine = self._machine
        return running[0]

    def watched(self) -> RunningModel:
        """Return the model that is inspected, and begin to measure the machine for it."""
        model = self.model
        self.measure()
        return model

    def close(self) -> None:
        """End the processes. May block for as long as they take."""
        for process in (self._samples, self._replays):
            process.close()

    # -- the machine

    def measure(self) -> asyncio.Task[None]:
        """Begin to measure the machine. Do nothing if it was measured before, while requests are open, or if the engine
        does not count the bytes that its steps read."""
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure())
        return self._measuring

    async def machine(self) -> Machine:
        """Return the measured rates of the machine; measure it first if that is possible now."""
        await self.measure()
        return self._machine

    def _is_idle(self) -> bool:
        return not any(model.client.num_unfinished for model in self._models.running)

    async def _measure(self) -> None:
        """Measure the machine; a request that comes meanwhile ends the measurement."""
        client = self.model.client
        if self._machine.bandwidth or not self._is_idle() or not (client.is_alive and client.info.weight_bytes):
            return
        process = BoundedProcess("headrace.quantize.samples", SAMPLE_CPU_S)
        task = asyncio.ensure_future(asyncio.to_thread(process.run, {}, Machine))
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_S))[0]:
                if not self._is_idle():
                    await asyncio.to_thread(process.close)
            with contextlib.suppress(ChildFailedError):
                result = task.result()
                self._machine = result if isinstance(result, Machine) else self._machine
                self.model.explainer.calls.machine = self._machine
        finally:
            process.close()

    # -- the routes

    def requests(self) -> Requests:
        """The open requests and those that ended last, a line each."""
        return summaries.requests_of(self.model.explainer.lives, time.monotonic())

    async def cache(self) -> Cache:
        """The prefix cache as a tree, and the reasons of its latest misses."""
        explainer, client = self.model.explainer, self.model.client
        if not client.is_alive:
            raise CallError(
                503, "no_engine", "the engine does not run now: it sleeps or is started", {"retry-after": "1"}
            )
        tree = await client.orders.give(ReadCache(summaries.MAX_BLOCKS), CacheTree)
        misses = summaries.misses_of(explainer.lives, name_of, explainer.calls.text_of)
        # On a thread, for decoding the texts of 2,000 nodes would hold the event loop.
        return await asyncio.to_thread(summaries.cache_of, tree, misses, explainer.calls.text_of, time.monotonic())

    async def hold(self, body: dict[str, Any]) -> Held:
        """Let the engine wait between two steps, for ten seconds at a time; without `num_steps` it goes on."""
        num_steps = convert(HoldRequest, body).num_steps
        if num_steps is not None and not 0 <= num_steps <= MAX_HELD_STEPS:
            raise RequestError("num_steps", num_steps, f"from 0 to {MAX_HELD_STEPS}, or left out")
        self._check_order()
        client = self.model.client
        if not client.is_alive:
            raise CallError(503, "no_engine", "no engine runs now that could be held", {"retry-after": "1"})
        num_left = await client.orders.give(HoldSteps(num_steps), int)
        return Held(is_held=num_left != NOT_HELD, num_steps=max(0, num_left))

    async def limits(self) -> Limits:
        """The speed of decoding against the limits of the machine's memory and arithmetic."""
        await self.measure()
        model = self.model
        facts = await asyncio.to_thread(model.facts)
        is_plain = not model.client.info.quantization and (facts is None or facts.quantization in FLOATS)
        about = (facts.num_parameters if facts else 0, "f32" if is_plain else "int8", time.monotonic())
        return limits_of(model.explainer.lives.reads, self._machine, *about)

    async def numbers(self, query: Mapping[str, str]) -> Names | Sample:
        """A group of the model's weights at 16, 8, 4 and 2 bits; without `name`, the names of some matrices."""
        name, group = query.get("name", ""), query.get("group", "0")
        path = await asyncio.to_thread(self.model.weights)
        if path is None:
            raise CallError(404, "not_found", "the model has no files")
        if not (group.isascii() and group.isdigit() and len(group) < 12):
            raise RequestError("group", group, "a whole number from 0 on")
        job = {"path": str(path), "name": name, "group": int(group)}
        reply = await asyncio.to_thread(self._samples.run, job, msgspec.Raw)
        if isinstance(reply, str):
            raise RequestError("name", name, f"a weight that can be read: {reply}")
        error = msgspec.msgpack.decode(reply, type=SampleReply).error
        if error is not None:
            raise RequestError(error[0], query.get(error[0], ""), error[1])
        return cast("Names | Sample", msgspec.msgpack.decode(reply, type=Sample if name else Names))

    async def recording(self, file: IO[bytes]) -> Response:
        """A recording of the schedule, replayed without the model: the live view's events, and each request's times."""
        try:
            reply = await asyncio.to_thread(self._replays.run, file.name, Replayed)
        finally:
            file.close()
            # The process would hold the memory of the replayed steps.
            await asyncio.to_thread(self._replays.close)
        error = reply if isinstance(reply, str) else reply.error.replace(file.name, "the file")
        if error or isinstance(reply, str):
            raise RequestError("body", "a recording", f"one that can be replayed: {error}")
        return Response(reply.body, media_type="application/json")


async def store(request: Request) -> IO[bytes]:
    """Write the body to a temporary file. Raises `CallError`, `ClientGoneError`, `DiskFullError`, `StorageError`."""
    with storing("written to"), Room(Path(tempfile.gettempdir()), RESERVE_BYTES) as room, ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=RECORDING))
        async for piece in body_pieces(request.scope, request.receive, MAX_RECORDING_BYTES):
            room.take(len(piece))
            file.write(piece)
            room.wrote(len(piece))
        file.flush()
        stack.pop_all()
    return file


def add_routes(app: Starlette, inspection: Inspection) -> None:
    """Add the routes."""
    routing.get(app, "/inspect/requests", inspection.requests, gives=Requests)
    routing.get(app, "/inspect/cache", inspection.cache, gives=Cache)
    routing.get(app, "/inspect/limits", inspection.limits, gives=Limits)
    routing.get(app, "/inspect/numbers", inspection.numbers, gives=Sample, query=("name", "group"))
    routing.post(app, "/inspect/hold", inspection.hold, takes=HoldRequest, gives=Held)
    routing.post(app, "/inspect/recording", inspection.recording, read=store, gives=Replay)
