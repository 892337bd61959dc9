"""The handshake of a client and a server, over TLS: who the other is, before any of its frames is read.

    state     waits for                         at most           then
    tls       the client's certificate          `Timeouts.tls`       Hello goes out
    hello     Join of at most 1 KiB, its proof  `Timeouts.proof`     Welcome or Refused
    open      frames                            `Timeouts.silence`   the connection ends

Each side proves that it has the fleet's secret by an HMAC over both nonces, the protocol's name and version, and the
certificates of both ends as it sees them. An old proof therefore opens nothing, nor does one that a third party relays:
its own certificate stands in between. Frames of another version are not read: a field that one side does not know would
change an answer unseen. Called by `fleet.remote` (a front is the client, an engine the server) and by `parallel.hosts`
(rank 0 is the server).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
from collections.abc import Sequence
from secrets import token_bytes
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.protocol import frames
from headrace.protocol.errors import HeadraceError
from headrace.secure.channel import pack
from headrace.secure.credentials import Credentials, certificate_digest

MAX_BYTES = 1024
"""The longest frame that is read before the secret is proven."""
NONCE_BYTES = 32
Refusal = Literal["version", "secret", "busy", "unfit"]
REASONS: dict[str, str] = {
    "version": "it runs another version of headrace; install the same one on both hosts",
    "secret": "the secrets differ; --fleet-secret-file must have the same bytes on both hosts",
    "busy": "it serves another front",
}


class Timeouts(NamedTuple):
    """Seconds that each state may last; see above. `beat`: between two signs of life."""

    tls: float = 5.0
    proof: float = 5.0
    silence: float = 15.0
    beat: float = 0.5


class ProtocolVersion(NamedTuple):
    """The name of a protocol, and the version of its messages."""

    name: str
    version: str


class HandshakeError(HeadraceError):
    """The other side is not one that this side talks to. `is_final`: nor will it be later."""

    code = "handshake_error"

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """From the server, first."""

    version: str
    nonce: bytes


class Join(msgspec.Struct, frozen=True, tag="join"):
    """From the client. `client` says who it is."""

    version: str
    nonce: bytes
    client: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """From the server: the client is served from now on. `terms`: further facts that it needs."""

    proof: bytes
    terms: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """From the server, which then hangs up. `text` says more than the reason."""

    reason: Refusal
    text: str = ""


_from_client: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
_from_server: msgspec.msgpack.Decoder[Hello | Welcome | Refused] = msgspec.msgpack.Decoder(Hello | Welcome | Refused)


def version_of(messages: Sequence[Any]) -> str:
    """Return a version of messages: a digest of all their fields, so that it cannot be forgotten."""
    schemas, components = msgspec.json.schema_components(messages)
    text = json.dumps(_without_prose([schemas, components]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_prose(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _without_prose(value) for name, value in node.items() if name != "description"}
    return [_without_prose(value) for value in node] if isinstance(node, list | tuple) else node


def proof(
    secret: bytes,
    role: Literal["client", "server"],
    protocol: ProtocolVersion,
    nonces: tuple[bytes, bytes],
    ends: tuple[bytes, bytes],
) -> bytes:
    """Return the proof that `role` has the secret. `nonces` and `ends` (digests of the certificates) are the server's
    and the client's, all of one length each."""
    text = f"headrace {protocol.name}/{role}/{protocol.version}/".encode()
    return hmac.digest(secret, text + b"".join((*nonces, *ends)), "sha256")


def end_of(writer: asyncio.StreamWriter) -> bytes:
    """Return the digest of the certificate that the other side has shown."""
    peer: ssl.SSLObject = writer.get_extra_info("ssl_object")
    return certificate_digest(peer.getpeercert(binary_form=True) or b"")


async def admit(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials, protocol: ProtocolVersion
) -> tuple[bytes, bytes]:
    """Let a client prove itself. Returns who it says it is, and the server's own proof for a `Welcome`.

    Raises `HandshakeError`, or `OSError` for a connection that ends."""
    hello = Hello(protocol.version, token_bytes(NONCE_BYTES))
    writer.write(pack(hello))
    join = await _receive(reader, _from_client)
    if join.version != hello.version:
        raise refuse(writer, "version")
    nonces, ends = (hello.nonce, join.nonce), (credentials.digest, end_of(writer))
    expected = proof(credentials.secret, "client", protocol, nonces, ends)
    if len(join.nonce) != NONCE_BYTES or not hmac.compare_digest(join.proof, expected):
        raise refuse(writer, "secret")
    return join.client, proof(credentials.secret, "server", protocol, nonces, ends)


def refuse(writer: asyncio.StreamWriter, reason: Refusal, text: str = "") -> HandshakeError:
    """Send a refusal, and return its error."""
    writer.write(pack(Refused(reason, text)))
    texts = {"version": "another version", "secret": "a wrong secret", "busy": "another one is served"}
    return HandshakeError(text or texts.get(reason, reason))


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    credentials: Credentials,
    protocol: ProtocolVersion,
    client: bytes,
    server: str,
) -> bytes:
    """Prove the secret to a server, and let it prove the same. Returns the terms of its `Welcome`.

    `client`: the name of this side. `server`: the name of the other side, for errors. Raises `HandshakeError`, or
    `OSError` for a connection that ends."""
    try:
        hello = await _receive(reader, _from_server)
    except ConnectionError as error:
        text = (
            "it hung up before its greeting; its log has the reason, such as a certificate that is not of its --tls-ca"
        )
        raise ConnectionError(text) from error
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeError(f"it does not begin as {server} does")
    nonces, ends = (hello.nonce, token_bytes(NONCE_BYTES)), (end_of(writer), credentials.digest)
    writer.write(
        pack(Join(protocol.version, nonces[1], client, proof(credentials.secret, "client", protocol, nonces, ends)))
    )
    answer = await _receive(reader, _from_server)
    match answer:
        case Refused(reason, text):
            raise HandshakeError(text or REASONS.get(reason, reason), is_final=reason != "busy")
        case Welcome(proof=theirs, terms=terms):
            if not hmac.compare_digest(theirs, proof(credentials.secret, "server", protocol, nonces, ends)):
                raise HandshakeError("it does not have the fleet's secret", is_final=True)
            return terms
        case _:
            raise HandshakeError("it greets twice")


def is_final(error: Exception) -> bool:
    """Whether a certificate, a secret or a version is at fault, which no waiting mends."""
    if isinstance(error, ssl.SSLError):
        return not isinstance(error, ssl.SSLEOFError)
    return isinstance(error, HandshakeError) and error.is_final


async def _receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        (length,) = frames.HEADER.unpack(await reader.readexactly(frames.HEADER.size))
        if length > MAX_BYTES:
            raise HandshakeError(f"a frame of {length} bytes before the secret is proven")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise ConnectionError("the connection ended in the handshake") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not its message, which may quote the received bytes.
        raise HandshakeError("not a handshake") from None
