"""Where the buffers of a graph lie in one arena: buffers whose lives overlap get disjoint places.

Greedy by size, first fit (Pisarchyk, Lee 2020: "Efficient Memory Management for Deep Neural Net Inference"), with a
segment tree over time, so that n buffers take O(n log n) steps where the bytes in use at a time have few gaps. Knows
sizes and times; must not know nodes or operators. Called by `graph`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """`size` bytes that are in use from time `first` to time `last`, both included."""

    size: int
    first: int
    last: int


def place(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return the offset of each block, and the size of the arena.

    The largest block comes first, of equal ones the earlier in the list; each takes the lowest offset that is free for
    its whole life.
    """
    times = Times(1 + max((block.last for block in blocks), default=0))
    offsets, total = [0] * len(blocks), 0
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i].size):
        size, first, last = blocks[i]
        offsets[i] = times.lowest(size, first, last)
        times.add(offsets[i], offsets[i] + size, first, last)
        total = max(total, offsets[i] + size)
    return offsets, total


class Spans:
    """A set of bytes as sorted intervals that neither overlap nor touch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        i, j = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if i < j:
            start, stop = min(start, self.starts[i]), max(stop, self.stops[j - 1])
        self.starts[i:j], self.stops[i:j] = [start], [stop]

    def after(self, offset: int, size: int) -> int:
        """Return the lowest offset from `offset` on with `size` free bytes."""
        i = bisect_right(self.stops, offset)
        while i < len(self.starts) and self.starts[i] < offset + size:
            offset = self.stops[i]
            i += 1
        return offset


class Times:
    """The bytes in use at each time, as a segment tree: node i has the children 2i and 2i + 1, time t is leaf
    `num_leaves` + t. A life is the few nodes that cover it.

    `whole[i]` has the bytes of the blocks that node i covers, `some[i]` the bytes of all blocks that node i or a node
    below it covers: two lives overlap where a node of one is a node of the other, or lies above it.
    """

    def __init__(self, num_times: int) -> None:
        self.num_leaves = 1 << (num_times - 1).bit_length()
        self.whole = [Spans() for _ in range(2 * self.num_leaves)]
        self.some = [Spans() for _ in range(2 * self.num_leaves)]

    def nodes(self, first: int, last: int) -> tuple[set[int], set[int]]:
        """Return the nodes that cover the times `first` to `last`, and the nodes above those."""
        low, high = first + self.num_leaves, last + self.num_leaves
        cover: set[int] = set()
        above: set[int] = set()
        while low <= high:
            if low % 2:
                cover.add(low)
            if not high % 2:
                cover.add(high)
            low, high = (low + 1) // 2, (high - 1) // 2
        for node in cover:
            node //= 2
            while node and node not in above:
                above.add(node)
                node //= 2
        return cover, above

    def lowest(self, size: int, first: int, last: int) -> int:
        """Return the lowest offset with `size` bytes that are free from time `first` to `last`."""
        cover, above = self.nodes(first, last)
        spans = [self.some[node] for node in sorted(cover)] + [self.whole[node] for node in sorted(above)]
        offset, before = 0, -1
        while offset != before:
            before = offset
            for part in spans:
                offset = part.after(offset, size)
        return offset

    def add(self, start: int, stop: int, first: int, last: int) -> None:
        """Take the bytes `start` to `stop` - 1 from time `first` to `last`."""
        cover, above = self.nodes(first, last)
        for node in cover:
            self.whole[node].add(start, stop)
        for node in cover | above:
            self.some[node].add(start, stop)
