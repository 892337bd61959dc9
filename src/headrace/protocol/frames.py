"""The messages between the server and the engine, and their frames on a socket.

A frame is a 4-byte little-endian length and that many bytes of msgpack, decoded against a closed set of tagged
structs: nothing that arrives can name a class, and an unknown tag or a wrong type is a `TransportError` (S-01).
Holds no policy and no socket; `engine.links` and `engine.child` are its callers.
"""

from __future__ import annotations

import signal
import socket
import struct

import msgspec

from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, EngineLostError, HeadraceError, ModelNotFoundError, RequestError
from headrace.protocol.step import Abort, Add, EngineInfo, ResetPrefixCache, StepOutput

MAX_FRAME_BYTES = 256 * 2**20
HEADER = struct.Struct("<I")
READ_BYTES = 1 << 16
STACKS_SIGNAL = signal.SIGUSR1
"""Makes the engine's process write the stacks of all threads to stderr, whatever they are doing."""
LAST_WORDS_SIGNAL = signal.SIGUSR2
"""Makes it write them into the black box."""


class TransportError(HeadraceError):
    """The peer sent something that is not a message, or hung up in the middle of one."""

    code = "transport_error"


class Start(msgspec.Struct, frozen=True, tag="start"):
    """To the engine, first: the model to load, the `fds` of its `black_box.BlackBox` if it has one, whether it replaces
    an engine that has died, the form of its log, one of `logs.FORMATTERS`, with the level, one of `LOG_LEVELS`, and the
    processors that it is bound to (none: all that its parent may use)."""

    config: EngineConfig
    black_box: tuple[int, int] | None = None
    is_restart: bool = False
    log_format: str = "text"
    log_level: str = "warning"
    cpus: list[int] = []


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """To the engine: note the events of its blocks from now on, or no longer."""

    is_watched: bool


class ShareKeys(msgspec.Struct, frozen=True, tag="share_keys"):
    """To the engine: report the keys of its prefix cache, all of them first, under the `secret` of a deployment. With
    another secret than before no request may be open."""

    secret: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the engine, first: it is loaded."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends. `kind` names the error's class, `message` is for people, and quotes no request."""

    kind: str
    message: str


class Output(msgspec.Struct, frozen=True, tag="output"):
    output: StepOutput


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine did not accept a request: the fields of the `RequestError` that it raised."""

    request_id: str
    field: str
    value: str
    bound: str
    code: str


class Order(msgspec.Struct, frozen=True, tag="order"):
    """To the engine: one of `engine.orders.Body` as msgpack, to be done between two steps."""

    order_id: str
    body: bytes


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """From the engine: the result of an order, as msgpack."""

    order_id: str
    body: bytes


ToEngine = Start | Add | Abort | ResetPrefixCache | Watch | ShareKeys | Order | Shutdown
FromEngine = Ready | Failed | Output | Rejected | Reply

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

# A struct checks itself when it is made, so a decoder may also raise the errors of its checks.
_MALFORMED = (msgspec.DecodeError, RequestError, UnicodeDecodeError)
_STARTUP_ERRORS: dict[str, type[HeadraceError]] = {
    "CheckpointError": CheckpointError,
    "ModelNotFoundError": ModelNotFoundError,
    # A rank ended without an error, as rank 0 and the other ranks report it.
    "RankLostError": EngineLostError,
    "EngineLostError": EngineLostError,
}


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the whole frame of one message. Raises `TransportError` above `MAX_FRAME_BYTES`."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {len(payload)} bytes is above the cap of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload)) + payload


def decode_to_engine(payload: bytes) -> ToEngine:
    """Return the message in `payload`. Raises `TransportError` for anything but one of `ToEngine`."""
    try:
        return _to_engine.decode(payload)
    except _MALFORMED as error:
        raise TransportError(f"not a message to the engine: {error}") from error


def decode_from_engine(payload: bytes) -> FromEngine:
    """Return the message in `payload`. Raises `TransportError` for anything but one of `FromEngine`."""
    try:
        return _from_engine.decode(payload)
    except _MALFORMED as error:
        raise TransportError(f"not a message from the engine: {error}") from error


class FrameBuffer:
    """Cuts a stream of bytes into payloads. Holds at most one unfinished frame."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes. Raises `TransportError` for a length above the cap, before the
        payload comes."""
        self._bytes += data
        payloads = []
        start = 0
        while len(self._bytes) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes, start)
            if length > self._max_frame_bytes:
                raise TransportError(f"a frame of {length} bytes is above the cap of {self._max_frame_bytes}")
            end = start + HEADER.size + length
            if len(self._bytes) < end:
                break
            payloads.append(bytes(self._bytes[start + HEADER.size : end]))
            start = end
        del self._bytes[:start]
        return payloads


class EngineSocket:
    """The engine's end of the socket: blocking writes, and reads of which the caller says whether they wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        # Messages that came in one read with the first.
        self._early: list[ToEngine] = []
        sock.setblocking(True)

    def receive_start(self) -> Start | None:
        """Wait for the first message. None once the server hung up; raises `TransportError` for another message."""
        messages = self.receive(wait=True)
        if not messages:
            return None
        first, *self._early = messages
        if not isinstance(first, Start):
            raise TransportError("the first message must be Start")
        return first

    def send(self, message: FromEngine) -> None:
        self._socket.sendall(encode(message))

    def receive(self, wait: bool) -> list[ToEngine] | None:
        """Return the messages that have arrived; waits for the first one if `wait`. None once the server hung up."""
        messages, self._early = self._early, []
        while True:
            try:
                data = self._socket.recv(READ_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                return None
            if not data:
                return None
            messages += [decode_to_engine(payload) for payload in self._frames.feed(data)]


def startup_error(failed: Failed) -> HeadraceError:
    """Return the error of a `Failed`: of the original class where callers rely on it."""
    return _STARTUP_ERRORS.get(failed.kind, HeadraceError)(failed.message)
