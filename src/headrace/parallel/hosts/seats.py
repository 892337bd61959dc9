"""The messages between the hosts of ranks, and `relay`, which joins their connection and a local socket.

A frame on the connection is empty (a sign of life), or its first byte says whom it is for: the rank's process, whose
frames pass unread, or the host. Called by `rendezvous` and `server`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from headrace.protocol import frames
from headrace.protocol.frames import TransportError
from headrace.secure.channel import Channel
from headrace.secure.handshake import ProtocolVersion

BEAT = frames.HEADER.pack(0)
PROCESS = b"\x00"
HOST = b"\x01"


class Seat(msgspec.Struct, frozen=True):
    """From a rank's host: who it is. `host_id` is drawn once for each host: it takes the place of its own older
    connection. `weights` is a digest of the model's files (`hub.digest`)."""

    host_id: bytes
    rank: int
    world: int
    weights: Annotated[str, msgspec.Meta(max_length=4096)]


class Seated(msgspec.Struct, frozen=True):
    """From rank 0, the terms of its welcome: the seconds after which it counts a silent rank as lost."""

    timeout: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """From rank 0, last: this rank will not do."""

    text: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """From a rank's host, last: its process has ended."""

    text: str


Note = Unfit | Ended
_encoder = msgspec.msgpack.Encoder()
_note: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)
_seat: msgspec.msgpack.Decoder[Seat] = msgspec.msgpack.Decoder(Seat)
_seated: msgspec.msgpack.Decoder[Seated] = msgspec.msgpack.Decoder(Seated)

encode = _encoder.encode


def protocol_version(version: str) -> ProtocolVersion:
    """Return the protocol of rank 0 and another rank. `version` covers all code that they must share."""
    return ProtocolVersion("ranks", version)


def seat_of(data: bytes) -> Seat:
    """Decode a seat. Raises `TransportError`."""
    try:
        return _seat.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"not the seat of a rank: {error}") from None


def seated_of(data: bytes) -> Seated:
    """Decode the terms of a welcome. Raises `TransportError`."""
    try:
        return _seated.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"not the terms of a welcome: {error}") from None


def note_frame(note: Note) -> bytes:
    return frame(HOST, encode(note))


def frame(addressee: bytes, payload: bytes) -> bytes:
    return b"".join((frames.HEADER.pack(1 + len(payload)), addressee, payload))


def open_channel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> Channel:
    """Return a channel that ends when nothing comes for `timeout` seconds."""
    # Signs of life are as frequent as the channel's count of seconds needs them.
    beat = min(0.5, timeout / 10)
    return Channel(reader, writer, bytes, frames.MAX_FRAME_BYTES, timeout, beat, lambda: BEAT)


async def relay(
    channel: Channel,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    on_note: Callable[[Note], None],
    down: Callable[[bytes], bytes] = bytes,
    up: Callable[[bytes], object] = bytes,
) -> bool:
    """Carry frames between a connection and a local socket until one of them ends; return whether it was the local one.

    Args:
        reader, writer: of the local socket, which is closed in the end.
        down: changes a frame that came over the connection, before it is written to the local socket.
        up: is called with each frame of the local socket, before that is sent.

    Raises `TransportError` for bytes that are no frame of a host, and the errors of `down`, `up` and `on_note`.
    """

    async def send_up() -> None:
        buffer = frames.FrameBuffer()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(frames.READ_BYTES):
                for payload in buffer.feed(data):
                    up(payload)
                    channel.send(frame(PROCESS, payload))
                    await channel.drain()

    async def send_down() -> None:
        async for payload in channel.messages():
            if payload[:1] == PROCESS:
                inner = down(payload[1:])
                writer.write(frames.HEADER.pack(len(inner)) + inner)
                await writer.drain()
            elif payload:
                on_note(_note_of(payload))

    tasks = [asyncio.create_task(_quietly(work())) for work in (send_up, send_down)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return tasks[0] in done
    finally:
        for task in tasks:
            task.cancel()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _quietly(work: Awaitable[None]) -> None:
    """The end of the local socket is no error."""
    with contextlib.suppress(ConnectionError):
        await work


def _note_of(payload: bytes) -> Note:
    if payload[:1] == HOST:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _note.decode(payload[1:])
    raise TransportError("not a frame between the hosts of ranks")
