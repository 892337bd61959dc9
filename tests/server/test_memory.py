"""What was freed between things that stay goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import pytest

from headrace.server import memory

PIECE, NUM = 16 << 10, 2000


def resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_R_21_freed_memory_below_a_used_piece_is_given_back() -> None:
    lib = ctypes.CDLL(None)
    lib.malloc.restype, lib.malloc.argtypes, lib.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    pieces = [lib.malloc(PIECE) for _ in range(NUM)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    most = resident()
    for piece in pieces[:-1]:
        lib.free(piece)
    kept = resident()
    assert memory.give_back()
    lib.free(pieces[-1])
    assert most - kept < NUM * PIECE // 4, "the C library gives it back by itself: then this is not needed"
    assert kept - resident() > NUM * PIECE // 2


def test_it_goes_on_until_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "EVERY_S", 0.0)

    def give_back() -> bool:
        calls.append(1)
        return len(calls) < 5

    monkeypatch.setattr(memory, "give_back", give_back)
    asyncio.run(asyncio.wait_for(memory.keep_giving_back(), 10))
    assert len(calls) == 5
