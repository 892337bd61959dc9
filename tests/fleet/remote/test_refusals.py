"""Who may not talk to an engine, and what it reads of them: refused in one line of the log, within bounds, and the
right front is served afterwards (S-41 to S-43)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.test_client import request
from tests.fleet.remote.test_link import Scripted
from tests.support.remote import FAST, credentials, files, front, listening, until

from headrace.engine.sessions import MoveSession
from headrace.fleet.remote import wire
from headrace.fleet.remote.server import EngineServer
from headrace.protocol import frames
from headrace.protocol.config import EngineConfig
from headrace.protocol.step import Add, Stats, StepOutput
from headrace.secure import door, handshake
from headrace.secure.channel import pack
from headrace.secure.credentials import Credentials
from headrace.secure.handshake import HandshakeError, Hello, Join, Timeouts, Welcome

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HUGE = frames.HEADER.pack(256 * 2**20)


OPENED: list[asyncio.StreamWriter] = []
"""Of one attack, to be closed after it."""


async def connect(port: int, context: ssl.SSLContext | None = None) -> Stream:
    """With the right certificate, if no other `context` is given."""
    stream = await asyncio.open_connection("127.0.0.1", port, ssl=context or credentials("front").context)
    OPENED.append(stream[1])
    return stream


async def connect_plainly(port: int) -> Stream:
    stream = await asyncio.open_connection("127.0.0.1", port)
    OPENED.append(stream[1])
    return stream


async def receive(stream: Stream) -> Any:
    (length,) = frames.HEADER.unpack(await stream[0].readexactly(4))
    return handshake._from_server.decode(await stream[0].readexactly(length))


async def join(stream: Stream, who: Credentials | None = None, front_id: bytes = b"front") -> Any:
    """What an engine says to a front that joins as it should."""
    who, hello = who or credentials("front"), await receive(stream)
    nonces, ends = (hello.nonce, b"n" * 32), (handshake.end_of(stream[1]), who.digest)
    proof = handshake.proof(who.secret, "client", wire.protocol_version(), nonces, ends)
    stream[1].write(pack(Join(wire.protocol_version().version, nonces[1], front_id, proof)))
    return await receive(stream)


async def is_over(stream: Stream) -> bool:
    """Whether the engine hangs up, whatever it says before."""
    try:
        async with asyncio.timeout(20):
            while await stream[0].read(2**16):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


async def serves(port: int) -> None:
    """The right front is served."""
    link = front(port)
    async with asyncio.timeout(20):
        await link.start(lambda message: None, lambda reason: None)
    await link.close()


def attack(work: Callable[[int, EngineServer], Awaitable[object]], times: Timeouts = FAST) -> Scripted:
    """Let `work` do its worst to an engine server, which must serve the right front before and after."""

    async def go() -> Scripted:
        link = Scripted()
        async with listening(link, times) as (port, server):  # type: ignore[arg-type]
            await work(port, server)
            for writer in OPENED:
                writer.close()
                writer.transport.abort()
            OPENED.clear()
            await until(lambda: server.front is None)
            answer(link)
            await serves(port)
            await until(lambda: server.front is None)
        return link

    return asyncio.run(go())


def answer(link: Scripted) -> None:
    """Reply to the order that marks the end of a front's requests."""
    if link.posted and isinstance(order := link.posted[-1], frames.Order):
        link.on_message(frames.Reply(order.order_id, b""))
        link.on_message(frames.Output(StepOutput(step_id=-1, stats=Stats())))


def made(folder: Path, name: str, commands: str) -> Path:
    """A folder with the front's certificate and key, and secret, made by `commands` of OpenSSL beside the fleet's."""
    for line in commands.format(files=files()).strip().splitlines():
        subprocess.run(line.split(), cwd=folder, check=True, capture_output=True)
    (folder / "fleet.secret").write_bytes((files() / "fleet.secret").read_bytes())
    (folder / "fleet.secret").chmod(0o600)
    return folder


OTHER_CA = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=other -keyout other.key -out other.pem
openssl req -x509 -CA other.pem -CAkey other.key -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=front -keyout front.key -out front.pem
"""  # noqa: E501


def test_S_41_a_front_of_another_ca_or_none_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = credentials("front", made(tmp_path, "front", OTHER_CA))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(files() / "ca.pem")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(files() / "ca.pem")
    old.load_cert_chain(files() / "front.pem", files() / "front.key")
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    async def work(port: int, server: EngineServer) -> None:
        # It may be mended at the engine: the front says so, and waits.
        starting = asyncio.create_task(front(port, who=other).start(lambda message: None, lambda reason: None))
        await until(lambda: "not of its --tls-ca" in caplog.text)
        starting.cancel()
        for context in (bare, old):
            with contextlib.suppress(OSError):
                assert await is_over(await connect(port, context))
        plain = await connect_plainly(port)
        plain[1].write(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert await is_over(plain)

    attack(work)
    for reason in ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "UNSUPPORTED_PROTOCOL"):
        assert reason in caplog.text
    assert caplog.text.count("refused 127.0.0.1 port") == 4


def test_S_41_an_engine_of_another_ca_or_name_is_refused(tmp_path: Path) -> None:
    other = made(tmp_path, "engine", OTHER_CA.replace("front.", "engine."))
    names = [str(other / name) for name in ("fleet.secret", "engine.pem", "engine.key")]
    nameless = [str(files() / name) for name in ("fleet.secret", "front.pem", "front.key")]

    async def work(mine: list[str]) -> None:
        who = Credentials.read(*[*mine, str(files() / "ca.pem")], is_server=True)

        def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        listener = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=who.context)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(HandshakeError, match="certificate verify failed"):
            await front(port).start(lambda message: None, lambda reason: None)
        listener.close()

    asyncio.run(work(names))
    asyncio.run(work(nameless))


def test_S_41_a_wrong_secret_opens_neither_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "fleet.secret").write_text("f" * 64)
    for name in ("front.pem", "front.key", "engine.pem", "engine.key"):
        (tmp_path / name).write_bytes((files() / name).read_bytes())

    async def work(port: int, server: EngineServer) -> None:
        with pytest.raises(HandshakeError, match="the secrets differ"):
            await front(port, who=credentials("front", tmp_path)).start(lambda m: None, lambda r: None)

    attack(work)
    assert "a wrong secret" in caplog.text
    assert "fff" not in caplog.text

    async def other_end() -> None:
        """An engine that lets everyone in, to read prompts."""

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(pack(Hello(wire.protocol_version().version, b"n" * 32)))
            await reader.read(1024)
            writer.write(pack(Welcome(b"p" * 32)))
            writer.close()

        listener = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=credentials("engine").context)
        with pytest.raises(HandshakeError, match="does not have the fleet's secret"):
            await front(listener.sockets[0].getsockname()[1]).start(lambda m: None, lambda r: None)
        listener.close()

    asyncio.run(other_end())


@pytest.mark.parametrize("challenged", [True, False], ids=["", "control"])
def test_S_41_an_old_proof_opens_nothing(challenged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes again, from one who has the certificate. Without a new nonce each time they would open the
    engine."""
    if not challenged:
        monkeypatch.setattr(handshake, "token_bytes", lambda num: b"0" * num)

    async def work(port: int, server: EngineServer) -> None:
        who = credentials("front")
        first = await connect(port)
        hello = await receive(first)
        nonces, ends = (hello.nonce, b"n" * 32), (handshake.end_of(first[1]), who.digest)
        old = pack(
            Join(
                wire.protocol_version().version,
                nonces[1],
                b"f",
                handshake.proof(who.secret, "client", wire.protocol_version(), nonces, ends),
            )
        )
        first[1].write(old)
        assert isinstance(await receive(first), Welcome)
        first[1].close()
        await until(lambda: server.front is None)
        again = await connect(port)
        await receive(again)
        again[1].write(old)
        assert isinstance(await receive(again), Welcome) is not challenged
        again[1].close()

    attack(work)


@pytest.mark.parametrize("bound", [True, False], ids=["", "control"])
def test_S_41_a_relayed_proof_opens_nothing(
    bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One with a certificate of the fleet and without the secret stands between a front and its engine. If a proof did
    not depend on the certificates, it could read all that it passes on."""
    if not bound:
        monkeypatch.setattr(handshake, "end_of", lambda writer: b"d" * 32)
        monkeypatch.setattr(Credentials, "digest", property(lambda self: b"d" * 32, lambda self, value: None), False)

    async def work(port: int, server: EngineServer) -> None:
        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream = await connect(port)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(2**16):
                    sink.write(data)
                sink.close()

            await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer), return_exceptions=True)
            writer.transport.abort()

        who = credentials("engine")
        listener = await asyncio.start_server(between, "127.0.0.1", 0, ssl=who.context)
        # Another certificate than the engine's: a front's with the engine's name would do as well.
        link = front(listener.sockets[0].getsockname()[1])
        starting = asyncio.create_task(link.start(lambda message: None, lambda reason: None))
        await asyncio.wait([starting], timeout=10)
        assert (starting.done() and starting.exception() is None) is not bound
        await link.close()
        starting.cancel()
        listener.close()

    engine_of_its_own = """
openssl req -x509 -CA {files}/ca.pem -CAkey {files}/ca.key -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=other -addext subjectAltName=IP:127.0.0.1 -keyout engine.key -out engine.pem
"""  # noqa: E501
    mine = credentials("engine", made(tmp_path, "engine", engine_of_its_own))
    real = credentials

    def of(name: str, *more: Any) -> Credentials:
        return mine if name == "engine" else real(name, *more)

    monkeypatch.setitem(globals(), "credentials", of)
    attack(work)
    assert ("a wrong secret" in caplog.text) is bound


def test_S_41_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def work(port: int, server: EngineServer) -> None:
        stream = await connect(port)
        await receive(stream)
        stream[1].write(pack(Join("0", b"n" * 32, b"f", b"p" * 32)))
        assert await receive(stream) == handshake.Refused("version")
        assert await is_over(stream)

    attack(work)
    assert "another version" in caplog.text


def test_the_version_depends_on_every_field() -> None:
    def with_more(description: str) -> str:
        fields = [("request_id", str), ("more", int, 0)]
        added = msgspec.defstruct("Added", fields, tag="abort", namespace={"__doc__": description})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "ToEngine", added)
            return wire.protocol_version.__wrapped__().version

    before = wire.protocol_version().version
    assert with_more("An end.") == with_more("The same in other words.") != before
    assert wire.protocol_version.__wrapped__().version == before


BEFORE_PROOF = {
    "256 MiB": (HUGE, "a frame of 268435456 bytes before the secret is proven"),
    "1 KiB and one byte": (frames.HEADER.pack(1025), "a frame of 1025 bytes before the secret is proven"),
    "garbage": (b"\xff" * 64, "a frame of 4294967295 bytes before the secret is proven"),
    "not a join": (pack(wire.Beat()), "not a handshake"),
    "a request": (pack(Add(request())), "not a handshake"),
    "cut": (pack(Join("0", b"", b"", b""))[:-3], "the connection ended in the handshake"),
}


@pytest.mark.parametrize("name", BEFORE_PROOF)
def test_S_42_nothing_but_a_small_proof_is_read_before_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data, reason = BEFORE_PROOF[name]

    async def work(port: int, server: EngineServer) -> None:
        stream = await connect(port)
        await receive(stream)
        stream[1].write(data)
        if name == "cut":
            stream[1].close()
        else:
            assert await is_over(stream)
        await until(lambda: reason in caplog.text, 20)

    assert not [each for each in attack(work).posted if isinstance(each, Add)]
    assert caplog.text.count("refused 127.0.0.1 port") == 1


ONE = Add(request())
MOVE = frames.Order("o", msgspec.msgpack.encode(MoveSession(path="/etc/passwd", weights="")))
AFTER_PROOF = {
    "256 MiB": (HUGE, "above the cap"),
    "a join again": (pack(Join("0", b"", b"", b"")), "not a message"),
    "a model": (pack(frames.Start(EngineConfig(model="/etc"))), "not a message"),
    "an end": (pack(frames.Shutdown()), "not a message"),
    "an order with a path": (pack(MOVE), "an order other than"),
    "a pickle": (frames.HEADER.pack(4) + b"\x80\x04N.", "not a message"),
    "a request twice": (pack(ONE) * 2, "a request twice"),
}


@pytest.mark.parametrize("name", AFTER_PROOF)
def test_S_42_what_no_front_sends_ends_its_connection(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data, reason = AFTER_PROOF[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def work(port: int, server: EngineServer) -> None:
        stream = await connect(port)
        assert isinstance(await join(stream), Welcome)
        await until(lambda: server.served is not None)
        stream[1].write(data)
        assert await is_over(stream)

    posted = attack(work).posted
    assert reason in caplog.text
    assert not [each for each in posted if isinstance(each, frames.Start | frames.Shutdown)]
    assert all(each.order_id.startswith("barrier-") for each in posted if isinstance(each, frames.Order))
    # In KiB. The frame is refused by its length.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_S_42_a_frame_of_a_front_that_is_too_long_fails_one_request() -> None:
    """At the front, and nothing of it is sent."""
    arrived: list[frames.FromEngine] = []
    long = request(list(range(1000)))

    async def work(port: int, server: EngineServer) -> None:
        link = front(port)
        await link.start(arrived.append, lambda reason: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "MAX_BYTES_TO_ENGINE", 1000)
            link.post(Add(long))
            link.post(ONE)
            await until(lambda: server.open_ids)
        await link.close()

    posted = attack(work).posted
    assert [type(each) for each in arrived] == [frames.Rejected]
    assert [each.request.request_id for each in posted if isinstance(each, Add)] == [ONE.request.request_id]


def test_S_42_an_engine_that_sends_256_mib_is_left() -> None:
    async def work(port: int, server: EngineServer) -> None:
        lost: list[str] = []
        link = front(port)
        await link.start(lambda message: None, lost.append)
        await until(lambda: server.served)
        channel = server.served
        assert channel is not None
        channel.send(HUGE)
        await until(lambda: lost)
        assert "above the cap" in lost[0]

    attack(work)


SHORT = Timeouts(tls=0.5, proof=0.5, silence=1.0, beat=0.1)


@pytest.mark.parametrize("state", ["tls", "hello", "half a join", "serving"])
def test_S_43_a_silent_peer_is_given_up_in_every_state(state: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work(port: int, server: EngineServer) -> None:
        if state == "tls":
            stream = await connect_plainly(port)
        else:
            stream = await connect(port)
        if state == "half a join":
            stream[1].write(frames.HEADER.pack(500) + b"x" * 100)
        if state == "serving":
            assert isinstance(await join(stream), Welcome)
        assert await is_over(stream)

    attack(work, SHORT)


@pytest.mark.parametrize("drops", [True, False], ids=["", "control"])
def test_S_43_idle_connectors_do_not_block_the_port(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places for them, and more: the newest, which is the front, is taken."""
    most = door.MAX_PENDING
    if not drops:
        monkeypatch.setattr(door, "MAX_PENDING", 10**9)

    async def go() -> None:
        async with listening(Scripted(), Timeouts(tls=60.0, proof=60.0)) as (port, server):  # type: ignore[arg-type]
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * most)]
            await until(lambda: server.door.num_pending >= most)
            await asyncio.sleep(0.2)
            assert (server.door.num_pending <= most) is drops
            await serves(port)
            for _, writer in idle:
                writer.close()

    asyncio.run(go())


def test_S_43_a_second_front_is_refused_and_the_same_one_replaces_itself() -> None:
    async def work(port: int, server: EngineServer) -> None:
        first = await connect(port)
        assert isinstance(await join(first), Welcome)
        second = await connect(port)
        assert await join(second, front_id=b"another") == handshake.Refused("busy")
        again = await connect(port)
        assert isinstance(await join(again), Welcome)
        assert await is_over(first)
        again[1].close()

    attack(work)
