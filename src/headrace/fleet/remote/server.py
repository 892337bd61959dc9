"""`EngineServer`: serves one front over TCP with an engine behind a `ProcessLink`.

A front that has proven itself gets the engine when it is loaded and has no requests of a front before. When a front is
lost, its requests are aborted. When the engine's process ends, the front hears of it, and another process starts. Knows
frames, and neither the model nor the contents of a request. Called by `headrace engine`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Protocol

import msgspec

from headrace.engine.cache_tree import ReadCache
from headrace.engine.holding import HoldSteps
from headrace.engine.links import Link
from headrace.engine.open_requests import negated, summed
from headrace.engine.orders import ReadFingerprint
from headrace.engine.parts import parts_of
from headrace.fleet.remote import wire
from headrace.protocol import frames
from headrace.protocol.errors import EngineLostError
from headrace.protocol.frames import TransportError
from headrace.protocol.step import Abort, Add, EngineInfo, ResetPrefixCache, Stats
from headrace.secure.channel import Channel, pack
from headrace.secure.credentials import Credentials
from headrace.secure.door import Door, Peer
from headrace.secure.handshake import Timeouts

logger = logging.getLogger("headrace.engine")

MAX_OPEN = 2**16
"""Requests of a front that are open at once."""
MAX_UNSENT_BYTES = 32 * 2**20
"""Bytes that wait for the engine's process, beyond which nothing is read from the front."""
PAUSE_S = 0.02
MAX_LOST_STARTS = 5
"""Engines that may end in a row before they are loaded."""
REACHED = "reached"
"""The barrier when its reply has come, and the output of its step has not."""

FrontOrder = ReadCache | ReadFingerprint | HoldSteps
"""The orders that a front may give."""
_order: msgspec.msgpack.Decoder[FrontOrder] = msgspec.msgpack.Decoder(FrontOrder)


class EngineLink(Link, Protocol):
    """A link that can wait for a slow reader of its messages, and says how much the engine has not read."""

    drain: Callable[[], Awaitable[None]] | None

    @property
    def num_unsent_bytes(self) -> int: ...


class EngineServer:
    """One engine for one front at a time.

    Args:
        link: starts the engine.
        credentials: for the proof of this side, and the check of the other.
        weights: returns the digest of the model's files (`hub.digest`); called once, on a worker thread.
    """

    def __init__(
        self, link: EngineLink, credentials: Credentials, weights: Callable[[], str], timeouts: Timeouts = Timeouts()
    ) -> None:
        self._link = link
        self.door = Door(credentials, wire.protocol_version(), timeouts, self._meet)
        self._digest = weights
        self._timeouts = timeouts
        self._weights: str | None = None
        self._info: EngineInfo | None = None
        self._seconds = 0.0
        # Set while the engine is loaded and has no requests of a front that is gone.
        self._ready = asyncio.Event()
        self._barriers = map("barrier-{}".format, itertools.count())
        self._barrier = ""
        # The front that has joined, its id, and the same once it has got `Loaded`.
        self.front: Channel | None = None
        self._front_id = b""
        self.served: Channel | None = None
        self._vacant = asyncio.Event()
        self.open_ids: set[str] = set()
        self._stats = self._base = Stats()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        link.drain = self._drain

    async def serve(self, listener: socket.socket) -> None:
        """Serve until it is cancelled. Raises the error that kept the engine from loading, the first time or again."""
        self._failure = asyncio.get_running_loop().create_future()
        self._spawn(self.door.accept(listener))
        self._spawn(self._load())
        try:
            await self._failure
        finally:
            self._ready.clear()
            for task in list(self._tasks):
                task.cancel()
            await self._link.close(at_once=True)

    async def until_loaded(self) -> None:
        """Wait until the engine is loaded, while `serve` runs."""
        await self._ready.wait()

    def _spawn(self, work: Awaitable[None]) -> None:
        """Start a task, whose failure ends `serve`."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                if self._failure is not None and not self._failure.done():
                    self._failure.set_exception(error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the engine

    async def _load(self) -> None:
        began = time.monotonic()
        self._info = await self._start_engine()
        self._seconds = time.monotonic() - began
        if self._weights is None:
            self._weights = await asyncio.to_thread(self._digest)
        self._stats, self._barrier = Stats(), ""
        logger.info("the engine is loaded, in %.1f s; weights %s", self._seconds, self._weights)
        self._ready.set()

    async def _start_engine(self) -> EngineInfo:
        """Start the engine; one that ends without an error, as after a SIGKILL, is started again a few times."""
        for _ in range(MAX_LOST_STARTS):
            try:
                return await self._link.start(self._on_message, self._on_lost)
            except EngineLostError as error:
                logger.error("%s; another one starts", error)
        return await self._link.start(self._on_message, self._on_lost)

    def _on_lost(self, reason: str) -> None:
        logger.error("the engine died with %d open requests: %s; another one starts", len(self.open_ids), reason)
        self._begin_anew(reason, self._link.was_killed)
        self._spawn(self._load())

    def _begin_anew(self, reason: str, was_killed: bool) -> None:
        """Forget the requests of an engine that is gone, and hang up on its front."""
        self._ready.clear()
        self.open_ids.clear()
        served, self.served = self.served, None
        if served is not None:
            self._send(served, wire.Lost(reason[:200], was_killed))
            served.close()

    async def _replace(self) -> None:
        logger.error("the front reports a frozen engine; it is killed, and another one starts")
        self._begin_anew("frozen", was_killed=False)
        await self._link.kill()
        await self._load()

    def _clear(self) -> None:
        """Abort the requests of a front that is gone. The next one is served after the reply to the order, and after
        the output of that step, which reports the ends: the next front may have requests with the same ids."""
        self._ready.clear()
        for request_id in self.open_ids:
            self._link.post(Abort(request_id))
        self.open_ids.clear()
        self._barrier = next(self._barriers)
        self._link.post(frames.Watch(False))
        self._link.post(frames.Order(self._barrier, msgspec.msgpack.encode(ReadCache(0))))

    def _on_message(self, message: frames.FromEngine) -> None:
        match message:
            case frames.Output(output):
                if output.stats is not None:
                    self._stats = output.stats
                    output.stats = _since(self._base, output.stats)
                    # The last part of this output.
                    if self._barrier == REACHED:
                        self._barrier = ""
                        self._ready.set()
                        return
                self.open_ids.difference_update(output.finished)
                # The link has put the rows together.
                output.alternatives = {}
                if self.served is not None:
                    for part in parts_of(output):
                        self._send(self.served, frames.Output(part))
            case frames.Reply(order_id):
                if order_id == self._barrier:
                    self._barrier = REACHED
                elif self.served is not None:
                    self._send(self.served, message)
            case frames.Rejected(request_id):
                self.open_ids.discard(request_id)
                if self.served is not None:
                    self._send(self.served, message)
            case _:
                raise TransportError(f"unexpected {type(message).__name__} from a running engine")

    async def _drain(self) -> None:
        if self.served is not None:
            await self.served.drain()

    def _send(self, channel: Channel, message: wire.FromEngine) -> None:
        channel.send(pack(wire.Sent(time.monotonic(), message)))

    # -- connections

    async def _meet(self, peer: Peer) -> None:
        """Serve a front that has proven itself until its connection ends."""
        front_id = peer.client
        if self.front is not None and front_id == self._front_id:
            self.front.cut("the same front has come again")
            async with asyncio.timeout(self._timeouts.proof):
                await self._vacant.wait()
        if self.front is not None:
            raise peer.refuse("busy")
        peer.welcome()
        self._vacant.clear()
        self._front_id = front_id
        beat = lambda: pack(wire.Sent(time.monotonic(), wire.Beat(self._link.usage())))  # noqa: E731
        bounds = (wire.MAX_BYTES_TO_ENGINE, self._timeouts.silence, self._timeouts.beat)
        self.front = Channel(peer.reader, peer.writer, wire.to_engine.decode, *bounds, beat)
        await self._serve_front(self.front, peer.name)

    async def _serve_front(self, front: Channel, name: str) -> None:
        logger.info("serves the front at %s", name)
        greeting = asyncio.create_task(self._greet(front))
        try:
            async for message in front.messages():
                if isinstance(message, wire.Kill) and self.served is front:
                    self._spawn(self._replace())
                elif not isinstance(message, wire.Beat):
                    self._pass_on(front, message)
                while self._link.num_unsent_bytes > MAX_UNSENT_BYTES:
                    front.heard()
                    await asyncio.sleep(PAUSE_S)
        except TransportError as error:
            front.cut(str(error))
        finally:
            front.close()
            greeting.cancel()
            num_open = len(self.open_ids)
            self.front = self.served = None
            self._vacant.set()
            if self._ready.is_set():
                self._clear()
            logger.warning("the front at %s is gone with %d open requests: %s", name, num_open, front.reason)

    async def _greet(self, front: Channel) -> None:
        """Let the front begin when the engine is ready. Its counters begin with it."""
        await self._ready.wait()
        self._base = self._stats
        if self._info is not None and self._weights is not None:
            self._send(front, wire.Loaded(self._info, self._weights, self._seconds))
            self.served = front

    def _pass_on(self, front: Channel, message: wire.ToEngine) -> None:
        """Send a front's message to the engine. Raises `TransportError` for one that no front sends."""
        if self.served is not front:
            raise TransportError(f"{type(message).__name__} before the engine was loaded")
        match message:
            case Add(request, times):
                if request.request_id in self.open_ids or len(self.open_ids) >= MAX_OPEN:
                    raise TransportError(f"a request twice, or more than {MAX_OPEN}")
                self.open_ids.add(request.request_id)
                # The times between the front's events are kept; when it was sent is when it came.
                now, last = time.monotonic(), max(times, default=0.0)
                self._link.post(Add(request, [now - (last - each) for each in times]))
            case Abort(request_id):
                self.open_ids.discard(request_id)
                self._link.post(message)
            case frames.Order(body=body):
                try:
                    _order.decode(body)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    raise TransportError("an order other than to read the cache or to hold steps") from None
                self._link.post(message)
            case frames.ShareKeys(secret) if not 0 < len(secret) <= blake2b.MAX_KEY_SIZE:
                raise TransportError(f"a secret of {len(secret)} bytes")
            case ResetPrefixCache() | frames.Watch() | frames.ShareKeys():
                self._link.post(message)
            case _:
                raise TransportError(f"unexpected {type(message).__name__}")


def _since(base: Stats, stats: Stats) -> Stats:
    """Return `stats` without the counts of `base`."""
    before = msgspec.structs.replace(negated(base), num_accepted_per_pos=[-num for num in base.num_accepted_per_pos])
    return summed(before, stats)
