"""The handshake of a front and an engine, over TLS: who the other is, before any of its frames is read.

    state     waits for                         at most           then
    tls       the client's certificate          `Times.tls`       Hello goes out
    hello     Join of at most 1 KiB, its proof  `Times.proof`     Welcome or Refused
    loading   the engine, loaded and empty      while both beat   Loaded
    serving   frames                            `Times.silence`   the connection ends

Each side proves that it has the fleet's secret by an HMAC over both nonces, the version, and the certificates of both
ends as it sees them. An old proof therefore opens nothing, nor does one that a third party relays: its own certificate
stands in between. Frames of another version are not read: a field that one side does not know would change an answer
unseen. Called by `link` (the front) and `server` (the engine).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import ssl
from secrets import token_bytes
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.fleet.remote import wire
from headrace.fleet.remote.credentials import Credentials, certificate_digest
from headrace.protocol import frames
from headrace.protocol.errors import HeadraceError

MAX_BYTES = 1024
"""The longest frame that is read before the secret is proven."""
NONCE_BYTES = 32
Refusal = Literal["version", "secret", "busy"]
REASONS: dict[str, str] = {
    "version": "it runs another version of headrace; install the same one on both hosts",
    "secret": "the secrets differ; --fleet-secret-file must have the same bytes on both hosts",
    "busy": "it serves another front",
}


class Times(NamedTuple):
    """Seconds that each state may last; see above. `beat`: between two signs of life."""

    tls: float = 5.0
    proof: float = 5.0
    silence: float = 15.0
    beat: float = 0.5


class HandshakeError(HeadraceError):
    """The other side is not one that this side talks to. `is_final`: nor will it be later."""

    code = "handshake_error"

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """From the engine, first."""

    version: str
    nonce: bytes


class Join(msgspec.Struct, frozen=True, tag="join"):
    """From the front. `front_id` is drawn once for each front: a front takes the place of its own older connection."""

    version: str
    nonce: bytes
    front_id: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """From the engine: the front is served from now on."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """From the engine, which then hangs up."""

    reason: Refusal


_from_front: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
_from_engine: msgspec.msgpack.Decoder[Hello | Welcome | Refused] = msgspec.msgpack.Decoder(Hello | Welcome | Refused)


@functools.cache
def version() -> str:
    """Return the version of the frames: a digest of all their fields, so that it can not be forgotten."""
    schemas, components = msgspec.json.schema_components([wire.ToEngine, wire.Sent])
    text = json.dumps(_without_prose([schemas, components]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_prose(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _without_prose(value) for name, value in node.items() if name != "description"}
    return [_without_prose(value) for value in node] if isinstance(node, list | tuple) else node


def proof(
    secret: bytes, role: Literal["front", "engine"], nonces: tuple[bytes, bytes], ends: tuple[bytes, bytes]
) -> bytes:
    """Return the proof that `role` has the secret. `nonces` and `ends` (digests of the certificates) are the engine's
    and the front's, all of one length each."""
    text = f"headrace fleet/{role}/{version()}/".encode()
    return hmac.digest(secret, text + b"".join((*nonces, *ends)), "sha256")


def end_of(writer: asyncio.StreamWriter) -> bytes:
    """Return the digest of the certificate that the other side has shown."""
    peer: ssl.SSLObject = writer.get_extra_info("ssl_object")
    return certificate_digest(peer.getpeercert(binary_form=True) or b"")


async def admit(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials
) -> tuple[bytes, Welcome]:
    """Let a front prove itself. Returns its id and the reply that it may get. Raises `HandshakeError`, or `OSError` for
    a connection that ends."""
    hello = Hello(version(), token_bytes(NONCE_BYTES))
    writer.write(wire.pack(hello))
    join = await _receive(reader, _from_front)
    if join.version != hello.version:
        raise refuse(writer, "version")
    nonces, ends = (hello.nonce, join.nonce), (credentials.digest, end_of(writer))
    expected = proof(credentials.secret, "front", nonces, ends)
    if len(join.nonce) != NONCE_BYTES or not hmac.compare_digest(join.proof, expected):
        raise refuse(writer, "secret")
    return join.front_id, Welcome(proof(credentials.secret, "engine", nonces, ends))


def refuse(writer: asyncio.StreamWriter, reason: Refusal) -> HandshakeError:
    """Send a refusal, and return its error."""
    writer.write(wire.pack(Refused(reason)))
    texts = {"version": "another version", "secret": "a wrong secret", "busy": "another front is served"}
    return HandshakeError(texts[reason])


async def join_engine(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials, front_id: bytes
) -> None:
    """Prove the secret to an engine, and let it prove the same. Raises `HandshakeError`, or `OSError` for a
    connection that ends."""
    try:
        hello = await _receive(reader, _from_engine)
    except ConnectionError as error:
        text = (
            "it hung up before its greeting; its log has the reason, such as a certificate that is not of its --tls-ca"
        )
        raise ConnectionError(text) from error
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeError("it does not begin as an engine does")
    nonces, ends = (hello.nonce, token_bytes(NONCE_BYTES)), (end_of(writer), credentials.digest)
    join = Join(version(), nonces[1], front_id, proof(credentials.secret, "front", nonces, ends))
    writer.write(wire.pack(join))
    answer = await _receive(reader, _from_engine)
    match answer:
        case Refused(reason):
            raise HandshakeError(REASONS[reason], is_final=reason != "busy")
        case Welcome(proof=theirs):
            if not hmac.compare_digest(theirs, proof(credentials.secret, "engine", nonces, ends)):
                raise HandshakeError("it does not have the fleet's secret", is_final=True)
        case _:
            raise HandshakeError("it greets twice")


async def _receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        (length,) = frames.HEADER.unpack(await reader.readexactly(frames.HEADER.size))
        if length > MAX_BYTES:
            raise HandshakeError(f"a frame of {length} bytes before the secret is proven")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise ConnectionError("the connection ended in the handshake") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not its message, which may quote what came.
        raise HandshakeError("not a handshake") from None
