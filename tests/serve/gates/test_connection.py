"""The connection's timers, its reserve and its share for each address (S-19), on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import h11
import pytest
from tests.campaigns import connections
from tests.campaigns.connections import Schedule, Server, VirtualLoop, Wire, play_all, virtual

from headrace.serve.gates import connection, limits
from headrace.serve.gates.accept import peer_of
from headrace.serve.gates.connection import PROBES, RESERVED, SECONDS, TABLE, Connection, Peers, Wait

GET = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n"
SILENT = Schedule([], "silence", reads_all=True, num_replies=None)
UNREAD = Schedule([], "silence", reads_all=False, num_replies=None)


def after(schedule: Schedule, *acts: tuple[float, bytes]) -> tuple[Wire, float | None]:
    """The connection of a client that sends each text after a pause and is silent then; the seconds until it ended."""

    async def run(loop: VirtualLoop) -> tuple[Wire, float | None]:
        wire = Server(loop).connect(schedule)
        for pause, text in acts:
            await asyncio.sleep(pause)
            wire.send(text)
        last = loop.time()
        await asyncio.sleep(1000)
        return wire, None if wire.lost_at is None else wire.lost_at - last

    with virtual() as loop:
        return loop.run_until_complete(run(loop))


HEAD = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
# What a client does before it is silent, and the seconds until its connection ends.
SILENCES: dict[str, tuple[list[tuple[float, bytes]], Wait, float]] = {
    "after connecting": ([], Wait.HEADERS, 10),
    "in the headers": ([(4.0, b"GET /")], Wait.HEADERS, 6),
    "after a reply": ([(0.0, GET % b"/quick")], Wait.NEXT, 5),
    "in further headers": ([(0.0, GET % b"/quick"), (4.0, b"GET")], Wait.HEADERS, 10),
    "in a body whose reply is sent": ([(0.0, HEAD % (b"/quick", 10)), (4.0, b"x")], Wait.REST, 6),
    "in a body without the 100 it waits for": (
        [(0.0, (HEAD % (b"/quick", 10))[:-2] + b"Expect: 100-continue\r\n\r\n")],
        Wait.REST,
        10,
    ),
    "in headers after another's body": ([(0.0, HEAD % (b"/quick", 1)), (4.0, b"xGET")], Wait.HEADERS, 10),
}


@pytest.mark.parametrize("name", SILENCES)
def test_S_19_a_silent_client_is_given_up_in_every_state(name: str) -> None:
    acts, _, seconds = SILENCES[name]
    assert after(SILENT, *acts)[1] == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize("name", SILENCES)
def test_S_19_control_each_of_these_needs_its_timer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acts, wait, _ = SILENCES[name]
    monkeypatch.setitem(SECONDS, wait, 10**6)
    assert after(SILENT, *acts)[1] is None


@pytest.mark.parametrize("path", [b"/big", b"/stream"])
def test_S_19_a_client_that_does_not_read_is_given_up(path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert after(UNREAD, (0.0, GET % path * 3))[1] is not None
    # Control: without the check of what it reads, it stays.
    monkeypatch.setattr(connection, "MIN_READ_RATE", -(10**9))
    assert after(UNREAD, (0.0, GET % path * 3))[1] is None


def test_S_19_random_clients_find_a_timer_in_every_state_and_none_that_cuts_them() -> None:
    problems, pairs = play_all(range(1500))
    assert problems == []
    states = {pair[:2] for pair in pairs if pair[2] != "END"}
    assert states == {(client.__name__, server.__name__) for client, server in TABLE}
    assert {pair[2] for pair in pairs} == {wait.name for wait in Wait}


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no timer for the rest of a body": lambda patch: patch.setitem(SECONDS, Wait.REST, 10**6),
    "no timer at the end": lambda patch: patch.setitem(SECONDS, Wait.END, 10**6),
    "headers in half the time": lambda patch: patch.setitem(SECONDS, Wait.HEADERS, 5.0),
    "a further request in half the time": lambda patch: patch.setitem(SECONDS, Wait.NEXT, 2.5),
    "twice the rate of reading": lambda patch: patch.setattr(connection, "MIN_READ_RATE", 2048),
    "twice the rate of sending": lambda patch: patch.setattr(limits, "MIN_BODY_RATE", 2048),
    "no review of what was received": lambda patch: patch.setattr(
        Connection, "data_received", connection.H11Protocol.data_received
    ),
    "no review after a reply": lambda patch: patch.setattr(
        Connection, "on_response_complete", connection.H11Protocol.on_response_complete
    ),
    "a timer that outlives the connection": lambda patch: patch.setattr(Connection, "_stop", lambda self: None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_S_19_control_random_clients_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    assert play_all(range(150))[0]


def test_a_polite_client_is_as_slow_as_it_may_be() -> None:
    chance = random.Random(1)
    pauses = [piece.pause for _ in range(200) for piece in connections.polite(chance).pieces]
    assert {29.5, 9.5} < set(pauses)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (GET % b"/quick", 200),
        (b"GET /quick HTTP/1.1\nHost: a\n\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: a\n\r\n", 400),
        (b"\nGET /quick HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: a\r\nX: a\r\n\tb\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
        (b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nT: x\n\r\n", 400),
        (b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nT: x\r\n\r\n", 200),
        (b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\na\r\n", 400),
        # A body may hold line feeds.
        (HEAD % (b"/read", 6) + b"\n\n\n x\n", 200),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 70_000, 431),
        (b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: x\r\n" * 12_000, 431),
    ],
)
@pytest.mark.parametrize("step", [10**6, 1])
def test_S_19_lines_that_can_be_cut_in_two_ways_are_refused(text: bytes, status: int, step: int) -> None:
    pieces = [(0.0, text[at : at + step]) for at in range(0, len(text), step)]
    if len(pieces) < 1000:
        wire, seconds = after(SILENT, *pieces)
        assert wire.received.startswith(b"HTTP/1.1 %d " % status)
        assert wire.received.count(b"HTTP/1.1 ") == 1
        assert seconds == pytest.approx(5 if status == 200 else 0)


def test_S_22_what_comes_before_a_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    upgrade = b"GET /quick HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    wire, _ = after(SILENT, (0.0, upgrade * 2), (0.0, b"\x16\x03\r\n"))
    assert [line[:12] for line in bytes(wire.received).split(b"HTTP/1.1 ")][1:] == [b"200 OK\r\nTran"] * 2 + [
        b"400 Bad Requ"
    ]
    # A body that is malformed when its call has begun.
    bad = b"POST /quick HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n"
    assert after(SILENT, (0.0, bad))[0].received.startswith(b"HTTP/1.1 400 ")
    assert not caplog.records


def crowd(monkeypatch: pytest.MonkeyPatch, total: int, play: Callable[[Server], Any]) -> None:
    """Play with a server that takes `total` connections."""
    monkeypatch.setattr(connection, "max_connections", lambda: total)

    async def run(loop: VirtualLoop) -> None:
        await play(Server(loop))

    with virtual() as loop:
        loop.run_until_complete(run(loop))


async def status_of(server: Server, peer: str, path: bytes) -> int:
    """The status of a request on a new connection; 0 if it gets none."""
    wire = server.connect(SILENT, peer)
    await asyncio.sleep(0)
    wire.send(GET % path)
    await asyncio.sleep(0.1)
    return int(wire.received[9:12] or 0)


def test_S_19_probes_are_answered_while_all_connections_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(server: Server) -> None:
        for index in range(48):
            server.connect(SILENT, f"10.0.1.{index}")
        # Silent clients fill the reserve too, again and again, and a probe takes the place of the oldest.
        for _ in range(3 * RESERVED):
            server.connect(SILENT, "10.0.0.9")
        for path in sorted(PROBES):
            assert await status_of(server, "10.0.0.9", path.encode()) == 200, path
            assert await status_of(server, "10.0.0.8", path.encode()) == 200, path
        assert await status_of(server, "10.0.0.8", b"/quick") == 503
        assert await status_of(server, "10.0.0.8", b"/health/live/x") == 503
        assert len(server.state.connections) <= 64
        await asyncio.sleep(100)
        assert not server.state.connections
        assert await status_of(server, "10.0.0.8", b"/quick") == 200

    crowd(monkeypatch, 64, play)


def test_S_19_control_without_a_reserve_probes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RESERVED", 0)

    async def play(server: Server) -> None:
        for index in range(64):
            server.connect(SILENT, f"10.0.1.{index}")
        assert await status_of(server, "10.0.0.8", b"/health/live") == 503

    crowd(monkeypatch, 64, play)


def test_S_19_reserved_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBES", frozenset({"/slow"}))

    async def play(server: Server) -> None:
        for index in range(48):
            server.connect(SILENT, f"10.0.1.{index}")
        for _ in range(RESERVED):
            assert await status_of(server, "10.0.0.9", b"/slow") == 0
        assert len(server.state.connections) == 64
        # All of them await a reply, and none gives way.
        assert await status_of(server, "10.0.0.8", b"/slow") == 503

    crowd(monkeypatch, 64, play)


def test_S_19_other_open_files_leave_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "max_connections", lambda: 64)
    peers = Peers()
    # Two connections, and so many files that the second got this descriptor: the reserve begins at 64 - 16.
    assert [peers.is_full("10.0.0.9", 2, number) for number in (9, 47, 48, 63)] == [False, False, True, True]
    assert peers.is_full("10.0.0.9", 49, 9)


def test_S_19_one_address_gets_its_share_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(server: Server) -> None:
        for _ in range(300):
            server.connect(SILENT, "10.0.0.9")
        assert await status_of(server, "10.0.0.9", b"/quick") == 503
        assert await status_of(server, "10.0.0.9", b"/health/live") == 200
        assert await status_of(server, "10.0.0.8", b"/quick") == 200
        await asyncio.sleep(100)
        assert await status_of(server, "10.0.0.9", b"/quick") == 200

    crowd(monkeypatch, 64, play)


def test_S_19_control_with_a_share_of_all_one_address_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "max_connections", lambda: 64)

    async def run(loop: VirtualLoop) -> None:
        server = Server(loop, most_per_peer=64)
        for _ in range(64):
            server.connect(SILENT, "10.0.0.9")
        assert await status_of(server, "10.0.0.8", b"/quick") == 503

    with virtual() as loop:
        loop.run_until_complete(run(loop))


def test_S_19_ten_thousand_that_connect_and_leave_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(server: Server) -> None:
        for index in range(10_000):
            wire = server.connect(SILENT, f"10.0.{index % 50}.1")
            wire.reset()
            if index % 100 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not server.state.connections
        peers = server.protocol.args[0]  # type: ignore[attr-defined]
        assert not peers.counts
        assert not peers.reserved

    crowd(monkeypatch, 64, play)


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_counts_as(host: str, peer: str) -> None:
    assert peer_of(host) == peer


def test_every_pair_of_states_has_its_row() -> None:
    assert all(client in vars(h11).values() or client.__name__ == "MIGHT_SWITCH_PROTOCOL" for client, _ in TABLE)
    assert set(TABLE.values()) == {Wait.HEADERS, Wait.REPLY, Wait.REST}
    assert set(SECONDS) == set(Wait)
