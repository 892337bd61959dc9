"""Offsets of buffers: those of a plain first fit, in a number of steps that grows no faster than n log n."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from headrace.backends.arena import Block, Spans, place

Placement = tuple[list[int], int]


def first_fit(blocks: list[Block]) -> Placement:
    """The same offsets by comparing each block with all that were placed before it."""
    placed: list[tuple[int, int, Block]] = []
    offsets = [0] * len(blocks)
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i].size):
        size, first, last = blocks[i]
        offset = 0
        for start, stop, other in sorted(placed):
            if other.first > last or other.last < first:
                continue
            if offset + size <= start:
                break
            offset = max(offset, stop)
        offsets[i] = offset
        placed.append((offset, offset + size, blocks[i]))
    return offsets, max((stop for _, stop, _ in placed), default=0)


def random_blocks(num: int, mean_life: float, seed: int) -> list[Block]:
    generator = random.Random(seed)
    blocks = []
    for _ in range(num):
        first = generator.randrange(num)
        last = min(num, first + int(generator.expovariate(1 / mean_life)))
        blocks.append(Block(64 * generator.randrange(1, 40), first, last))
    return blocks


def experts(num: int) -> list[Block]:
    """About `num` blocks of layers of 128 experts: short lives, and two of each layer that last for all its experts."""
    blocks: list[Block] = []
    at = 0
    while len(blocks) < num:
        blocks += [Block(4096, at, at + 128 * 4), Block(2048, at, at + 128 * 4)]
        for _ in range(128):
            blocks += [
                Block(256, at, at + 1),
                Block(64, at, at + 1),
                Block(8192, at + 1, at + 2),
                Block(512, at + 2, at + 3),
            ]
            at += 4
    return blocks


def num_steps(function: Callable[[list[Block]], Placement], blocks: list[Block]) -> int:
    """Lines of Python that a call of `function` runs."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(blocks)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("mean_life", [0.5, 4.0, 60.0, 1000.0])
@pytest.mark.parametrize("num", [1, 2, 17, 150])
def test_offsets_are_those_of_a_plain_first_fit(num: int, mean_life: float) -> None:
    for seed in range(10):
        blocks = random_blocks(num, mean_life, seed)
        assert place(blocks) == first_fit(blocks)


def test_the_buffers_of_many_experts_lie_as_by_a_plain_first_fit() -> None:
    blocks = experts(1500)
    assert place(blocks) == first_fit(blocks)


def test_no_blocks_take_no_bytes() -> None:
    assert place([]) == ([], 0)


def grows_like(function: Callable[[list[Block]], Placement], few: list[Block], many: list[Block]) -> float:
    """By what the number of steps for each block grows from `few` to `many`."""
    return num_steps(function, many) / len(many) / (num_steps(function, few) / len(few))


def test_the_number_of_steps_is_linear_but_for_a_logarithm() -> None:
    assert grows_like(place, experts(500), experts(8000)) < 2  # log2(8000) / log2(500) is 1.5
    crowd = [[Block(64 * (i % 7 + 1), 0, n) for i in range(n)] for n in (250, 2000)]
    assert grows_like(place, *crowd) < 2


def test_control_a_comparison_with_all_blocks_takes_more_steps() -> None:
    assert grows_like(first_fit, experts(500), experts(2000)) > 2.5


def test_twenty_thousand_buffers_get_places() -> None:
    blocks = experts(20_000)
    offsets, total = place(blocks)
    assert len(blocks) >= 20_000
    assert total == place(experts(1500))[1]
    assert max(offsets) < total


def test_spans_merge_where_they_touch() -> None:
    spans = Spans()
    for start, stop in ((64, 128), (256, 320), (128, 192), (0, 10), (192, 256)):
        spans.add(start, stop)
    assert (spans.starts, spans.stops) == ([0, 64], [10, 320])
    assert [spans.after(0, size) for size in (54, 55)] == [10, 320]
