"""Bodies that come slowly, and all bodies together in memory (S-19), on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.campaigns.connections import PIECE, Schedule, Server, VirtualLoop, Wire, virtual

from headrace.serve.gates import limits
from headrace.serve.gates.limits import BODY_IDLE_S, MIN_BODY_RATE, read_body

SILENT = Schedule([], "silence", reads_all=True, num_replies=None)
SIZE = 4 * 2**20
HEAD = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


def played(play: Callable[[Server], Any]) -> Any:
    async def run(loop: VirtualLoop) -> Any:
        return await play(Server(loop))

    with virtual() as loop:
        return loop.run_until_complete(run(loop))


async def upload(server: Server, size: int, messages: int) -> Wire:
    """A connection with a body of `size` bytes, of which so many are sent."""
    wire = server.connect(SILENT)
    wire.send(HEAD % size)
    while messages:
        wire.send(b"x" * min(messages, 2**16))
        messages -= min(messages, 2**16)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)
    return wire


def status(wire: Wire) -> int:
    return int(wire.received[9:12] or 0)


async def trickle(server: Server, data: bytes, pause: float, total: float) -> list[int]:
    """The replies to twelve uploads that come fast, and then with a pause before each further piece."""
    wires = [await upload(server, SIZE, SIZE // 2) for _ in range(12)]
    end = server.loop.time() + total
    while server.loop.time() < end:
        await asyncio.sleep(pause)
        for wire in wires:
            wire.send(data)
    return [status(wire) for wire in wires]


def test_S_19_uploads_that_come_fast_and_then_trickle_are_given_up() -> None:
    assert played(lambda server: trickle(server, b"x", 20, 61)) == [408] * 12


def test_S_19_control_uploads_at_the_least_rate_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PIECE) > MIN_BODY_RATE * BODY_IDLE_S
    assert played(lambda server: trickle(server, PIECE, 29, 29 * 70)) == [200] * 12
    # And without the rate, those that trickle are held as long as they send.
    monkeypatch.setattr(limits, "MIN_BODY_RATE", 1 / BODY_IDLE_S)
    assert played(lambda server: trickle(server, b"x", 20, 7200)) == [0] * 12


def test_S_19_the_bodies_in_memory_are_bounded_and_a_fast_one_is_never_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", SIZE)

    async def play(server: Server) -> None:
        slow = [await upload(server, 2 * SIZE, SIZE // 4 + limits.FREE_BODY_BYTES) for _ in range(4)]
        await asyncio.sleep(10)
        assert [status(wire) for wire in slow] == [0] * 4
        for _ in range(3):
            fast = await upload(server, SIZE // 2, SIZE // 2)
            assert status(fast) == 200
        assert [status(wire) for wire in slow].count(503) == 2
        dropped = next(wire for wire in slow if status(wire) == 503)
        assert b"retry-after: 5" in dropped.received
        small = [await upload(server, limits.FREE_BODY_BYTES, limits.FREE_BODY_BYTES) for _ in range(20)]
        assert [status(wire) for wire in small] == [200] * 20

    played(play)


def test_S_19_control_without_the_bound_no_body_is_dropped() -> None:
    async def play(server: Server) -> None:
        slow = [await upload(server, 2 * SIZE, SIZE // 4) for _ in range(4)]
        assert status(await upload(server, SIZE // 2, SIZE // 2)) == 200
        assert [status(wire) for wire in slow] == [0] * 4

    played(play)


def test_a_whole_body_counts_until_its_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 10**6)

    async def receive_of(*sizes: int) -> Any:
        pieces = [{"type": "http.request", "body": b"x" * size, "more_body": True} for size in sizes]
        pieces.append({"type": "http.request", "body": b"", "more_body": False})

        async def receive() -> Any:
            await asyncio.sleep(0.01)
            return pieces.pop(0)

        return receive

    async def run() -> None:
        async with read_body({"headers": []}, await receive_of(900_000)) as body:
            assert len(body) == 900_000
            with pytest.raises(limits.CallError, match="all that come now") as refused:
                async with read_body({"headers": []}, await receive_of(500_000)):
                    raise AssertionError("it was taken")
            assert refused.value.status == 503
        async with read_body({"headers": []}, await receive_of(500_000)) as body:
            assert len(body) == 500_000

    with virtual() as loop:
        loop.run_until_complete(run())
