"""`RemoteLink`: the front's side of an engine on another host.

It connects, also again after a loss, and checks that the engine there computes the same as before: a stream goes on
with the same bits or not at all. Knows no requests. a `Replica` is its only caller, on one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from secrets import token_bytes
from typing import Any

import msgspec

from headrace.engine.links import POSTED_BYTES, OnLost, OnMessage
from headrace.engine.parts import Joiner
from headrace.engine.records.black_box import BlackBox
from headrace.fleet.remote import facts, wire
from headrace.fleet.remote.stamps import Stamps
from headrace.protocol import frames
from headrace.protocol.frames import TransportError
from headrace.protocol.step import Add, EngineInfo
from headrace.secure.channel import Channel, pack
from headrace.secure.credentials import Credentials
from headrace.secure.door import Server, connect
from headrace.secure.handshake import HandshakeError, Timeouts, is_final

logger = logging.getLogger("headrace.engine")

RETRY_S = 1.0
FORMATS = tuple(
    "version vocab_size eos_token_ids hidden_size dtype quantization activations kv_cache_dtype backend".split()
)
"""The numbers of an engine that decide its bits, apart from its weights."""


class RemoteLink:
    """An engine at `host` and `port`. Its loss is the end of the connection.

    Args:
        weights: returns the digest of the front's own copy of the model's files, "" if it has none; called once, on a
            worker thread. An engine with others is refused.
        certified_name: the name that the engine's certificate must have; None: `host`.

    Attributes:
        load_seconds: how long the engine took to load.
    """

    in_process = False
    black_box: BlackBox | None = None
    pid = None

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        weights: Callable[[], str],
        timeouts: Timeouts = Timeouts(),
        certified_name: str | None = None,
    ) -> None:
        self.name = f"{host}:{port}"
        self.was_killed = False
        self.adapters = dict[str, str]()
        self.load_seconds = 0.0
        self._server = Server("an engine", host, port, certified_name or host)
        self._credentials = credentials
        self._digest = functools.cache(weights)
        self._timeouts = timeouts
        self._front_id = token_bytes(16)
        # The digest of the weights, and the `FORMATS`, of the engine that was connected first.
        self._identity: tuple[Any, ...] | None = None
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._posted: asyncio.Queue[wire.ToEngine] = asyncio.Queue()
        self._stamps = Stamps()
        # The last two signs of life: when they came, and the processor time in them.
        self._beats: list[tuple[float, tuple[float, bool] | None]] = []

    async def start(self, on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
        """Connect to the engine, and wait until it is loaded. Waits for an engine that is not there yet.

        Raises `HandshakeError` for an engine that will not do, unless one was connected before.
        """
        self._leave()
        weights = await asyncio.to_thread(self._digest)
        reported = ""
        while True:
            try:
                return await self._connect(weights, on_message, on_lost)
            except (OSError, HandshakeError, TransportError) as error:
                text = str(error) or type(error).__name__
                if self._identity is None and is_final(error):
                    raise HandshakeError(f"the engine at {self.name}: {text}", is_final=True) from error
                if text != reported:
                    logger.warning("the engine at %s: %s; tried again until it is there", self.name, text)
                    reported = text
            await asyncio.sleep(RETRY_S)

    async def _connect(self, weights: str, on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
        reader, writer, _ = await connect(
            self._server, self._credentials, wire.protocol_version(), self._timeouts, self._front_id
        )
        bounds = (wire.MAX_BYTES_FROM_ENGINE, self._timeouts.silence, self._timeouts.beat)
        channel = Channel(reader, writer, wire.from_engine.decode, *bounds, lambda: pack(wire.Beat()))
        try:
            messages = channel.messages()
            info = self._check(await _first(messages, channel), weights)
        except BaseException:
            channel.cut("not served")
            raise
        self._channel, self._posted, self._stamps, self._beats = channel, asyncio.Queue(), Stamps(), []
        self._tasks = [
            asyncio.create_task(self._receive(channel, messages, on_message, on_lost)),
            asyncio.create_task(self._send_posted(channel, self._posted, on_message)),
        ]
        return info

    def _check(self, loaded: wire.Loaded, weights: str) -> EngineInfo:
        """Return the engine's numbers. Raises `HandshakeError` for an engine that computes something else, or has
        numbers that none has."""
        facts.check(loaded)
        if weights and weights != loaded.weights:
            text = f"it serves other weights (digest {loaded.weights}) than the model here (digest {weights})"
            raise HandshakeError(text, is_final=True)
        identity = (loaded.weights, *(getattr(loaded.info, name) for name in FORMATS))
        if self._identity not in (None, identity):
            raise HandshakeError("it has come back with other weights or formats than the open streams began with")
        if self._identity is None:
            checked = "the same as here" if weights else "not checked, for the model's folder here has no weights"
            logger.info("the engine at %s has weights %s, %s", self.name, loaded.weights, checked)
        self._identity = identity
        self.load_seconds = loaded.seconds
        return loaded.info

    def post(self, message: frames.ToEngine) -> None:
        if self._channel is not None:
            self._posted.put_nowait(message)  # type: ignore[arg-type]

    async def _send_posted(self, channel: Channel, posted: asyncio.Queue[wire.ToEngine], on_message: OnMessage) -> None:
        num_bytes = 0
        while True:
            message = await posted.get()
            try:
                frame = pack(message, wire.MAX_BYTES_TO_ENGINE)
            except TransportError as error:
                if not isinstance(message, Add):
                    raise
                bound = f"of {wire.MAX_BYTES_TO_ENGINE} bytes at most"
                on_message(frames.Rejected(message.request.request_id, "request", str(error), bound, "invalid_request"))
                continue
            if isinstance(message, Add):
                self._stamps.note_sent(message.request.request_id, message.times)
            channel.send(frame)
            num_bytes += len(frame)
            if num_bytes >= POSTED_BYTES:
                num_bytes = 0
                await channel.drain()
                await asyncio.sleep(0)

    async def _receive(
        self, channel: Channel, messages: AsyncIterator[Any], on_message: OnMessage, on_lost: OnLost
    ) -> None:
        joiner, reason = Joiner(), ""
        # A connection may end because a request harmed the engine's host, or for any other reason.
        self.was_killed = True
        try:
            async for envelope in messages:
                now, message = time.monotonic(), envelope.message
                match message:
                    case wire.Beat(usage) if usage is not None and not 0 <= usage[0] < math.inf:
                        raise TransportError(f"{usage[0]} s of processor time")
                    case wire.Beat(usage):
                        self._beats = [*self._beats[-1:], (now, usage)]
                        continue
                    case wire.Lost(reason, was_killed):
                        self.was_killed = was_killed
                        continue
                    case frames.Output(output):
                        self._stamps.stamp(output, envelope.clock, now)
                        joiner.join(output)
                    case frames.Reply():
                        message = self._stamps.stamp_reply(message, envelope.clock, now)
                    case frames.Rejected(request_id):
                        self._stamps.forget(request_id)
                on_message(message)
        except (TransportError, msgspec.DecodeError) as error:
            reason = str(error)
        except Exception as error:  # a defect of the server; the engine is of no use without its reader
            logger.exception("the reader of the engine's messages failed")
            reason = f"{type(error).__name__} in the server"
        self._leave(at_once=True)
        on_lost(f"the engine at {self.name}: {reason or channel.reason}")

    def usage(self) -> tuple[float, bool] | None:
        """Return the processor time of the engine. Between two signs of life it goes on as before the last."""
        if not self._beats or self._channel is None:
            return None
        (before, earlier), (last, usage) = self._beats[0], self._beats[-1]
        if usage is None or earlier is None:
            return None
        since = time.monotonic() - last
        speed = (usage[0] - earlier[0]) / (last - before) if last > before else 0.0
        return usage[0] + speed * min(since, 2 * self._timeouts.beat), usage[1] and since < 2 * self._timeouts.beat

    async def kill(self) -> None:
        channel, is_beating = self._channel, bool(self._beats)
        self.was_killed = False
        if channel is not None and is_beating and time.monotonic() - self._beats[-1][0] < 4 * self._timeouts.beat:
            # Its server lives: the engine's own process stands still.
            channel.send(pack(wire.Kill()))
        self._leave()

    async def close(self, at_once: bool = False) -> None:
        self._leave(at_once)

    def _leave(self, at_once: bool = False) -> None:
        """End the connection; the engine aborts its requests."""
        channel, self._channel = self._channel, None
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []
        if channel is not None:
            channel.cut(channel.reason) if at_once else channel.close()


async def _first(messages: AsyncIterator[Any], channel: Channel) -> wire.Loaded:
    """Return the first message but for signs of life. Raises `EngineDeadError`, `TransportError` or `OSError`."""
    async for envelope in messages:
        match envelope.message:
            case wire.Loaded():
                return envelope.message
            case wire.Beat():
                continue
            case other:
                raise TransportError(f"the engine began with {type(other).__name__}")
    raise ConnectionError(channel.reason)
