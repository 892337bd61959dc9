"""The frames between a front and an engine on another host, and `Channel`, which carries them.

Most are those of `protocol.frames`. None of them names a model or a path: the engine's own command line says what it
loads. Each direction has its bound on a frame, so a channel holds no more than one frame of that size and what one read
brings. Called by `link` and `server`; `handshake` has come before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from headrace.protocol import frames
from headrace.protocol.errors import RequestError
from headrace.protocol.frames import TransportError
from headrace.protocol.step import Abort, Add, EngineInfo, ResetPrefixCache
from headrace.protocol.watchdog import Watchdog

MAX_BYTES_TO_ENGINE = 32 * 2**20
"""Above every request: a body has 8 MiB at most, and a million token ids take 5 MB."""
MAX_BYTES_FROM_ENGINE = 64 * 2**20
CLOSE_S = 1.0
"""Seconds in which the last frames are sent."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """To either side: a sign of life. From the engine with its processor time, as `protocol.watchdog.usage` has it."""

    usage: tuple[float, bool] | None = None


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """To the engine: its process is frozen and must be replaced."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """From the engine, first: it is loaded, has no requests, and took `seconds` to load. `weights` is a digest of the
    model's files (`hub.digest`)."""

    info: EngineInfo
    weights: str
    seconds: float


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """From the engine, last: its process has ended. `was_killed`: by a SIGKILL from outside."""

    reason: str
    was_killed: bool


ToEngine = Add | Abort | ResetPrefixCache | frames.Watch | frames.ShareKeys | frames.Order | Beat | Kill
FromEngine = Loaded | Lost | frames.Output | frames.Rejected | frames.Reply | Beat


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A message from the engine, and what its clock (monotonic seconds) showed when it was sent."""

    clock: float
    message: FromEngine


_encoder = msgspec.msgpack.Encoder()
to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)


def pack(message: Any, max_bytes: int = MAX_BYTES_FROM_ENGINE) -> bytes:
    """Return the whole frame of a message. Raises `TransportError` above `max_bytes`."""
    payload = _encoder.encode(message)
    if len(payload) > max_bytes:
        raise TransportError(f"a frame of {len(payload)} bytes is above the cap of {max_bytes}")
    return frames.HEADER.pack(len(payload)) + payload


class Channel:
    """A connection whose other side has proven itself. It ends when nothing comes for `silence` seconds.

    Args:
        decoder: of the frames that come, which have `max_bytes` at most.
        beat: makes the sign of life that is sent each `seconds`.

    `reason` says why the connection has ended.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Any],
        max_bytes: int,
        silence: float,
        seconds: float,
        beat: Callable[[], ToEngine | Sent],
    ) -> None:
        self.reason = "the connection was closed"
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._buffer = frames.FrameBuffer(max_bytes)
        self._silence = Watchdog(silence)
        self._beats = asyncio.create_task(self._beat(seconds, silence, beat))

    async def messages(self) -> AsyncIterator[Any]:
        """Yield what comes, until the end of the connection. Raises `TransportError` for what is no message."""
        with contextlib.suppress(OSError):
            while data := await self._reader.read(frames.READ_BYTES):
                self.heard()
                for payload in self._buffer.feed(data):
                    yield self._decode(payload)
                # A read of what has come already does not let others run.
                await asyncio.sleep(0)

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        # A struct checks itself when it is made, so a decoder may also raise what its checks raise.
        except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
            raise TransportError(f"not a message of this direction: {error}") from error

    def heard(self) -> None:
        """Note that the other side is alive."""
        self._silence.heard()

    def send(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def drain(self) -> None:
        """Wait while the other side is slow to read, or until the connection has ended."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def cut(self, reason: str) -> None:
        """End the connection, and drop what is not sent."""
        self.reason = reason
        self._beats.cancel()
        self._writer.transport.abort()

    def close(self) -> None:
        """End the connection when what was sent so far is out, which may take `CLOSE_S`."""
        self._beats.cancel()
        self._writer.close()

    async def _beat(self, seconds: float, silence: float, beat: Callable[[], ToEngine | Sent]) -> None:
        while True:
            await asyncio.sleep(seconds)
            if self._silence.tick(time.monotonic(), None):
                self.cut(f"nothing came for {silence:g} s")
            self.send(pack(beat()))
