"""The frames between a front and an engine on another host, which a `secure.channel.Channel` carries.

Most are defined in `protocol.frames`. None of them names a model or a path: the engine's own command line does. Called
by `link` and `server`; the handshake has come before.
"""

from __future__ import annotations

import functools

import msgspec

from headrace.protocol import frames
from headrace.protocol.step import Abort, Add, EngineInfo, ResetPrefixCache
from headrace.secure.handshake import ProtocolVersion, version_of

MAX_BYTES_TO_ENGINE = 80 * 2**20
"""Above every request: the pictures of one have 64 MiB at most, and a million token ids take 5 MB."""
MAX_BYTES_FROM_ENGINE = 64 * 2**20


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
    """A message from the engine, and the time of its clock (monotonic seconds) when it was sent."""

    clock: float
    message: FromEngine


to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)


@functools.cache
def protocol_version() -> ProtocolVersion:
    """Return the protocol of a front and an engine."""
    return ProtocolVersion("fleet", version_of([ToEngine, Sent]))
