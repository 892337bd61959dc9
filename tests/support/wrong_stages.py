"""Stages that break the law on purpose, for negative controls. As a program (`MODE FD`) it is the process of a rank."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headrace.parallel import pipeline
from headrace.parallel.program import HiddenRows

message_of, cut = pipeline.message_of, pipeline.cut


def rounded(call_id: int, piece: int, rows: Any) -> HiddenRows:
    """Hidden rows as most engines send them: in bfloat16."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return message_of(call_id, piece, nearest.view(np.float32))


def in_reverse(chunks: Any, world: int) -> list[pipeline.Piece]:
    """The later rows of a sequence before those that they look at."""
    return cut(chunks, world)[::-1]


def patch(mode: str, setattr_: Any = setattr) -> None:
    """Break the law in this process: "rounded" or "reverse"; "right" breaks nothing."""
    if mode == "rounded":
        setattr_(pipeline, "message_of", rounded)
    elif mode == "reverse":
        setattr_(pipeline, "cut", in_reverse)


if __name__ == "__main__":
    from headrace.engine import rank

    patch(sys.argv[1])
    sys.exit(rank.main(int(sys.argv[2])))
