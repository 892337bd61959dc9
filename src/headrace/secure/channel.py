"""`Channel`: frames over a connection whose other side has proven itself, with signs of life both ways.

Each direction has its bound on a frame, so a channel holds no more than one frame of that size and the bytes of one
read. Knows no messages: its decoder is an argument. Called by `fleet.remote` and `parallel.hosts`.
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
from headrace.protocol.watchdog import Watchdog

MAX_BYTES = 64 * 2**20
"""The longest frame that is sent, unless a direction has another bound."""
CLOSE_S = 1.0
"""Seconds in which the last frames are sent."""

_encoder = msgspec.msgpack.Encoder()


def pack(message: Any, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the whole frame of a message. Raises `TransportError` above `max_bytes`."""
    payload = _encoder.encode(message)
    if len(payload) > max_bytes:
        raise TransportError(f"a frame of {len(payload)} bytes is above the cap of {max_bytes}")
    return frames.HEADER.pack(len(payload)) + payload


class Channel:
    """A connection whose other side has proven itself. It ends when nothing comes for `silence` seconds.

    Args:
        decode: makes a message of a frame that has come, of `max_bytes` at most.
        beat: makes the frame of a sign of life, which is sent each `seconds`.

    `reason` says why the connection has ended.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decode: Callable[[bytes], Any],
        max_bytes: int,
        silence: float,
        seconds: float,
        beat: Callable[[], bytes],
    ) -> None:
        self.reason = "the connection was closed"
        self._reader = reader
        self._writer = writer
        self._decode_frame = decode
        self._buffer = frames.FrameBuffer(max_bytes)
        self._silence = Watchdog(silence)
        self._beats = asyncio.create_task(self._beat(seconds, silence, beat))

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the messages, until the end of the connection. Raises `TransportError` for bytes that are no
        message."""
        with contextlib.suppress(OSError):
            while data := await self._reader.read(frames.READ_BYTES):
                self.heard()
                for payload in self._buffer.feed(data):
                    yield self._decode(payload)
                # A read of bytes that are here already does not yield to other tasks.
                await asyncio.sleep(0)

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decode_frame(payload)
        # A struct checks itself when it is made, so a decoder may also raise the errors of its checks.
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
        """End the connection, and drop the unsent bytes."""
        self.reason = reason
        self._beats.cancel()
        self._writer.transport.abort()

    def close(self) -> None:
        """End the connection when all messages so far are out, which may take `CLOSE_S`."""
        self._beats.cancel()
        self._writer.close()

    async def until_closed(self) -> None:
        """Wait until the messages before `close` are out, and the connection is gone."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _beat(self, seconds: float, silence: float, beat: Callable[[], bytes]) -> None:
        while True:
            await asyncio.sleep(seconds)
            if self._silence.tick(time.monotonic(), None):
                self.cut(f"nothing came for {silence:g} s")
            self.send(beat())
