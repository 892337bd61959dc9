"""R-21: reads take little memory, so that the heap does not wander."""

from __future__ import annotations

import asyncio
import socket
from asyncio import selector_events
from typing import Any

import pytest
from tests.support.server import Live, child

from headrace.engine.links import READ_BYTES, read_small
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

TRANSPORT: Any = vars(selector_events)["_SelectorSocketTransport"]


class Pieces(asyncio.Protocol):
    def __init__(self, small: bool) -> None:
        self.small = small
        self.lengths: list[int] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.small:
            read_small(transport)

    def data_received(self, data: bytes) -> None:
        self.lengths.append(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def lengths(small: bool) -> list[int]:
    """Of what is read of 100,000 bytes that lie ready."""
    ours, theirs = socket.socketpair()
    theirs.sendall(bytes(100_000))
    theirs.close()
    _, pieces = await asyncio.get_running_loop().create_connection(lambda: Pieces(small), sock=ours)
    await pieces.ended
    return pieces.lengths


def test_R_21_a_read_takes_no_more_than_it_may() -> None:
    assert max(asyncio.run(lengths(small=False))) > READ_BYTES, "it does so by itself"
    result = asyncio.run(lengths(small=True))
    assert max(result) == READ_BYTES
    assert sum(result) == 100_000


def test_R_21_callers_and_the_engine_are_read_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TRANSPORT._read_ready
    sizes: list[int] = []

    def watched(self: Any) -> None:
        sizes.append(self.max_size)
        read(self)

    monkeypatch.setattr(TRANSPORT, "_read_ready", watched)
    with Live(child(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 4}).status_code == 200
    assert len(sizes) > 5
    assert set(sizes) == {READ_BYTES}
