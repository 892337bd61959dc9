"""The connections of ranks on several hosts: who is refused, and what is noticed when one ends or falls silent.

The ranks' processes are scripts here, which compute nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.hosts import FAST, RankHost, place, rank_host
from tests.support.ranks import until
from tests.support.remote import credentials, files

from headrace.backends.base import SetUp
from headrace.engine.hosts import await_hosts, prepared
from headrace.engine.ranks import Go, Start
from headrace.parallel import gloo
from headrace.parallel.group import Group, Loaded, Ready
from headrace.parallel.hosts import seats
from headrace.parallel.hosts.rendezvous import Rendezvous
from headrace.parallel.program import LogitsOf, RankLostError
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.frames import TransportError
from headrace.protocol.sources import digest_of_sources
from headrace.secure.credentials import Credentials
from headrace.secure.door import Server, connect
from headrace.secure.handshake import HandshakeError, ProtocolVersion, Timeouts

SCRIPT = """
import os, signal, socket, sys, time
from headrace.engine.rank import Inbox
from headrace.backends.base import SetUp
from headrace.engine.ranks import Go, Start
from headrace.parallel.group import Loaded, Ready, framed
sock = socket.socket(fileno=int(sys.argv[2]))
inbox = Inbox(sock)
start = inbox.expect(Start)
if sys.argv[1] == "silent":
    time.sleep(60)
sock.sendall(framed(Loaded(7)))
inbox.expect(Go)
inbox.expect(SetUp)
sock.sendall(framed(Ready()))
while inbox.call() is not None:
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
"""
SET_UP = SetUp((8,), 16, "float32", 1, 16, 8, 1)


def script(mode: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", SCRIPT, mode)


@contextlib.contextmanager
def rendezvous(
    world: int = 2, timeout: float = 5.0, weights: str = "w", speaks: str = "", times: Timeouts = FAST
) -> Iterator[Rendezvous]:
    listener = socket.create_server(("127.0.0.1", 0))
    hosts = Rendezvous(
        listener, world, timeout, credentials("engine"), speaks or digest_of_sources(), lambda: weights, times
    )
    try:
        yield hosts
    finally:
        hosts.close()
        hosts.close()


def scripted(hosts: Rendezvous, mode: str = "", **more: Any) -> contextlib.AbstractContextManager[RankHost]:
    """A host of rank 1 there, whose process is the script."""
    return rank_host(hosts.address[1], **({"weights": lambda: "w", "command": script(mode)} | more))


class NoGathers:
    """Of ranks that gather nothing."""

    is_broken = False

    def address(self) -> int:
        return 0

    def begin(self, call_id: int) -> None:
        pass

    def fault(self) -> str:
        return "lost" if self.is_broken else ""

    def break_group(self) -> None:
        self.is_broken = True


@contextlib.contextmanager
def group_at(hosts: Rendezvous, timeout: float = 5.0) -> Iterator[tuple[Group, list[str]]]:
    """A group of the ranks that come there, and why it was lost."""
    lost: list[str] = []

    def first(rank: int, memory: int) -> Start:
        return Start(EngineConfig(model="m"), rank, 2, memory, timeout, False, [])

    group = Group(2, timeout, False, first, lost.append, gathers=NoGathers(), hosts=hosts)
    try:
        yield group, lost
    finally:
        group.close()


def load(group: Group) -> None:
    assert [message.weight_bytes for message in group.expect(Loaded)] == [7]
    group.send(Go([]))
    group.send(SET_UP)
    group.expect(Ready)
    group.watch()


def call(group: Group) -> None:
    """Send a call to a rank that ends by it, which may be noticed before this returns."""
    with contextlib.suppress(RankLostError):
        group.send(LogitsOf(group.begin(), [0]))


def refusal(host: RankHost) -> str:
    host.thread.join(20)
    assert isinstance(host.error, HandshakeError)
    return str(host.error)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"rank": 2}, "--rank 2 is not one of 1 to 1"),
        ({"rank": 0}, "--rank 0 is not one of 1 to 1"),
        ({"world": 3}, "the model has 2 ranks here, and --world is 3"),
        ({"speaks": "others"}, "another version of headrace"),
        ({"name": "10.0.0.1"}, "certificate verify failed"),
    ],
    ids=["no such rank", "rank 0", "world", "version", "name"],
)
def test_S_44_a_rank_that_does_not_belong_is_refused_in_clear_words(inputs: dict[str, Any], message: str) -> None:
    with rendezvous() as hosts, rank_host(hosts.address[1], weights=lambda: "w", **inputs) as host:
        assert message in refusal(host)


def test_S_44_another_secret_is_refused_by_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in files().iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "fleet.secret").write_text("another secret of more than 32 bytes" * 2)
    who = credentials("front", tmp_path)
    with rendezvous() as hosts, rank_host(hosts.address[1], weights=lambda: "w", who=who) as host:
        assert "the secrets differ" in refusal(host)
    assert "a wrong secret" in caplog.text


def test_S_44_a_certificate_of_another_ca_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x"
    subprocess.run([*command.split(), "-keyout", "k", "-out", "c"], cwd=tmp_path, check=True, capture_output=True)
    names = (files() / "fleet.secret", tmp_path / "c", tmp_path / "k", files() / "ca.pem")
    who = Credentials.read(*map(str, names), is_server=False)
    with rendezvous() as hosts, scripted(hosts, who=who) as host:
        until(lambda: "refused 127.0.0.1" in caplog.text)
        assert not hosts.places
        assert host.server.num_groups == 0


@pytest.mark.parametrize("name", ["fleet", "ranks"])
def test_S_44_a_proof_for_another_end_opens_nothing(name: str) -> None:
    """A front's proof, with the secret and even the version of ranks; with its name it is a rank's."""
    with rendezvous() as hosts:
        server = Server("rank 0", *hosts.address, "127.0.0.1")
        seat = seats.encode(seats.Seat(b"host", 1, 2, "w"))

        async def work() -> bytes:
            _, writer, terms = await connect(
                server, credentials("front"), ProtocolVersion(name, digest_of_sources()), FAST, seat
            )
            writer.close()
            await writer.wait_closed()
            return terms

        if name == "ranks":
            assert seats.seated_of(asyncio.run(work())).timeout == 5.0
        else:
            with pytest.raises(HandshakeError, match="the secrets differ"):
                asyncio.run(work())


def test_other_weights_are_refused_and_the_same_are_not() -> None:
    for weights in ("w", "others"):
        with (
            rendezvous() as hosts,
            scripted(hosts, weights=lambda weights=weights: weights) as host,
            group_at(hosts) as (group, _),
        ):
            group.expect(Loaded)
            if weights == "w":
                hosts.check_weights()
                continue
            with pytest.raises(CheckpointError, match="rank 1 has other weights"):
                hosts.check_weights()
            assert "rank 1 has other weights (digest others) than rank 0 (digest w)" in refusal(host)


def test_a_second_rank_of_one_number_waits_and_a_host_takes_the_place_of_its_own_older_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with rendezvous(world=3) as hosts, contextlib.ExitStack() as stack:
        first = stack.enter_context(scripted(hosts, world=3))
        until(lambda: 1 in hosts.places)
        first_id = hosts.places[1].seat.host_id
        stack.enter_context(scripted(hosts, world=3))
        until(lambda: "rank 1 is there already" in caplog.text)
        assert hosts.places[1].seat.host_id == first_id
        first.close()
        # The other one comes again, and has the place now.
        until(lambda: 1 in hosts.places and hosts.places[1].seat.host_id != first_id)


def test_calls_reach_the_rank_and_its_death_is_noticed_at_once() -> None:
    with rendezvous() as hosts, scripted(hosts, "dies") as host:
        with group_at(hosts) as (group, lost):
            load(group)
            call(group)
            until(lambda: bool(lost))
            assert lost == ["rank 1: its process ended (SIGKILL)"]
            with pytest.raises(RankLostError, match="SIGKILL"):
                group.check()
        until(lambda: host.server.num_groups == 1)
        assert host.thread.is_alive()


@pytest.mark.parametrize("side", ["rank 0", "rank 1"])
def test_a_silent_side_is_given_up(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither frames nor an end of the connection: as where a cable is cut."""
    with (
        rendezvous(timeout=1.0) as hosts,
        scripted(hosts) as host,
        group_at(hosts, 1.0) as (group, lost),
    ):
        load(group)
        channel = hosts.places[1].channel
        if side == "rank 0":
            channel._beats.cancel()  # its own watch of the other side ends too
            until(lambda: host.server.num_groups == 1)
        else:
            # What comes no longer counts as a sign of life.
            monkeypatch.setattr(channel, "heard", lambda: None)
            until(lambda: bool(lost))
            assert lost == ["rank 1: nothing came for 1 s"]


def test_a_rank_that_sends_no_message_is_lost() -> None:
    bad = SCRIPT.replace("    if sys.argv[1]", "    sock.sendall(bytes([1, 0, 0, 0, 0xC1]))\n    if sys.argv[1]")
    with (
        rendezvous() as hosts,
        scripted(hosts, command=(sys.executable, "-c", bad, "")),
        group_at(hosts) as (group, lost),
    ):
        load(group)
        call(group)
        until(lambda: bool(lost))
        assert lost[0].startswith("rank 1 sent what is no message")


def test_a_process_that_stands_still_while_it_loads_is_replaced() -> None:
    with (
        rendezvous(timeout=1.0) as hosts,
        scripted(hosts, "silent") as host,
    ):
        with group_at(hosts, 1.0) as (group, _), pytest.raises(RankLostError, match="stood still for 1 s"):
            group.expect(Loaded)
        assert host.thread.is_alive()


def test_a_rank_that_leaves_before_all_are_there_may_come_again() -> None:
    with rendezvous(world=3) as hosts:
        with scripted(hosts, world=3):
            until(lambda: 1 in hosts.places)
        until(lambda: 1 not in hosts.places)
        with scripted(hosts, world=3):
            until(lambda: 1 in hosts.places)


def test_S_44_only_frames_of_hosts_are_taken() -> None:
    for data in (b"\x02x", b"\x01x", seats.HOST + msgspec.msgpack.encode({"type": "other"})):
        with pytest.raises(TransportError):
            seats._note_of(data)
    assert seats._note_of(seats.HOST + seats.encode(seats.Ended("why"))) == seats.Ended("why")
    with pytest.raises(TransportError):
        seats.seat_of(b"x")
    with pytest.raises(TransportError):
        seats.seated_of(b"x")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_S_44_absurd_numbers_of_another_host_are_refused(seconds: float) -> None:
    with pytest.raises(TransportError, match=r"terms of a welcome: .*timeout"):
        seats.seated_of(seats.encode(seats.Seated(seconds)))
    with pytest.raises(TransportError, match=r"seat of a rank: .*weights"):
        seats.seat_of(seats.encode(seats.Seat(b"x", 1, 2, "w" * 5000)))
    for num_bytes in (-1, 2**60):
        with pytest.raises(msgspec.DecodeError, match="weight_bytes"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(Loaded(num_bytes)), type=Loaded)


def test_S_44_a_rank_takes_no_path_from_another_host() -> None:
    config = EngineConfig(
        model="/theirs", tokenizer="/theirs", revision="r", record_schedule="/theirs", num_threads=7,
        quantization="int8", tensor_parallel_size=2, rendezvous=place(1),  # type: ignore[arg-type]
        speculative_config={"method": "draft_model", "model": "/theirs", "num_speculative_tokens": 2},  # type: ignore[arg-type]
    )  # fmt: skip
    start = Start(config, 1, 2, 5, 3.0, True, [0])
    encoded = msgspec.msgpack.encode(start)
    assert b"/theirs" in encoded
    result = prepared(encoded, 1, "/ours", 1, "lo")
    assert b"/theirs" not in result
    assert b"fleet.secret" not in result
    decoded = msgspec.msgpack.decode(result, type=Start)
    assert (decoded.config.model, decoded.config.num_threads, decoded.config.quantization) == ("/ours", 1, "int8")
    assert (decoded.memory, decoded.cpus, decoded.interface) == (-1, [], "lo")
    for wrong in (b"x", msgspec.msgpack.encode(Go([])), encoded[:-3]):
        with pytest.raises(TransportError):
            prepared(wrong, 1, "/ours", 1, "lo")
    with pytest.raises(TransportError, match="a start of rank 1"):
        prepared(encoded, 2, "/ours", 1, "lo")


def test_an_address_or_an_interface_at_fault_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_at(**changes: Any) -> None:
        config = EngineConfig(tensor_parallel_size=2, rendezvous=place(0) | changes)  # type: ignore[arg-type]
        assert config.rendezvous is not None
        await_hosts(config, config.rendezvous, "m", None)

    with pytest.raises(RequestError, match="distributed_interface: 'none0' is not allowed; it must be an interface of"):
        open_at(distributed_interface="none0")
    with pytest.raises(RequestError, match=r"rendezvous: '192\.0\.2\.1:0'"):
        open_at(host="192.0.2.1")
    with pytest.raises(RequestError, match="fleet_secret_file"):
        open_at(fleet_secret_file="/none")
    with pytest.raises(RequestError, match="rendezvous"):
        EngineConfig(tensor_parallel_size=2, rendezvous={"host": "x"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="left out with tensor_parallel_size 1"):
        EngineConfig(rendezvous=place(1))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(RequestError, match=r"pip install 'headrace\[torch\]'"):
        gloo.require_gloo()
