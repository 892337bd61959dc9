"""Orders: the tasks of an engine between two steps: session files, views of the prefix cache, the fingerprint, holds,
and adapters.

`carry_out` runs in the engine's process; `engine.order_calls` is the server's side. Called by `engine.child`.
"""

from __future__ import annotations

import msgspec

from headrace.engine import cache_tree, sessions
from headrace.engine.cache_tree import ReadCache
from headrace.engine.core import EngineCore
from headrace.engine.holding import Hold, HoldSteps
from headrace.engine.sessions import MoveSession
from headrace.protocol import frames
from headrace.protocol.adapters import LoadAdapter, UnloadAdapter


class ReadFingerprint(msgspec.Struct, frozen=True, tag="read_fingerprint"):
    """Order: return the digest of all that decides the bits of the engine's answers (`engine.fingerprint`)."""


Body = MoveSession | ReadCache | ReadFingerprint | HoldSteps | LoadAdapter | UnloadAdapter

_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


def decode(body: bytes) -> Body:
    """Return an order. Raises `TransportError` for anything but one of `Body`."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise frames.TransportError(f"not an order to the engine: {error}") from error


def carry_out(core: EngineCore, order: Body, hold: Hold) -> bytes:
    """Do an order and return its result as msgpack. `hold` is the engine's."""
    match order:
        case MoveSession():
            return msgspec.msgpack.encode(sessions.move(core, order))
        case ReadCache():
            return msgspec.msgpack.encode(cache_tree.read(core.scheduler, order))
        case ReadFingerprint():
            return msgspec.msgpack.encode(core.fingerprint())
        case LoadAdapter() | UnloadAdapter():
            return msgspec.msgpack.encode(core.change_adapters(order))
        case HoldSteps():
            return msgspec.msgpack.encode(hold.set(order))
