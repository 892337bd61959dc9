"""How the ranks of a model share out the columns of its rows: heads by KV head, other columns by panel.

Every rank makes the same plan by itself. Knows widths and numbers of heads; must not know weights, models or processes.
Called by `sharding` and by the backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.protocol.errors import RequestError

UNITS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Columns that stay together: groups of activations with one scale, the kernels' panels, or fewer where a matrix is
small."""
SPARE = 8
"""Units of a rank, at least, in the largest unit that may be taken: so the shares differ by an eighth at most."""
MAX_RANKS = 64
"""The most ranks for which csrc/include/ranks.h has room."""

Bounds = tuple[int, int]
"""First and last + 1."""


class Part(NamedTuple):
    """`width` columns, of which rank r has bounds[r][0] ... bounds[r][1] - 1. Several ranks may have the same."""

    width: int
    bounds: tuple[Bounds, ...]

    def num(self, rank: int) -> int:
        begin, end = self.bounds[rank]
        return end - begin


class Layout(NamedTuple):
    """A row in parts, one after the other; a rank's own row has its columns of each part, one after the other."""

    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    def num(self, rank: int) -> int:
        """Return the columns of a rank."""
        return sum(part.num(rank) for part in self.parts)

    def bounds(self, rank: int) -> list[Bounds]:
        """Return a rank's columns as places in the whole row, in the order of the rank's row."""
        places, start = [], 0
        for part in self.parts:
            begin, end = part.bounds[rank]
            places.append((start + begin, start + end))
            start += part.width
        return places

    def spans(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the columns that a rank gives of each row: (first column in the rank's row, place in the whole row,
        number). Columns that several ranks have are given by the first of them."""
        spans, column, start = [], 0, 0
        for part in self.parts:
            begin, end = part.bounds[rank]
            if end > begin and (begin, end) not in part.bounds[:rank]:
                spans.append((column, start + begin, end - begin))
            column += end - begin
            start += part.width
        return spans

    def is_grouped(self, group: int) -> bool:
        """Return whether each rank has whole groups of columns, so that it can quantise them by itself. The last group
        of a row may be shorter."""
        if len(self.parts) > 1:
            return False
        return all(
            begin % group == 0 and (end % group == 0 or end == self.width) for begin, end in self.parts[0].bounds
        )


class HeadShare(NamedTuple):
    """Heads of one rank: queries `first` ... and KV heads `first_kv` ..."""

    first: int
    num: int
    first_kv: int
    num_kv: int


class Plan(NamedTuple):
    """The shares of all ranks, as rank `rank` of `world` sees them. whole_experts: of a mixture, a rank has some
    experts whole instead of some columns of each."""

    rank: int
    world: int
    whole_experts: bool = False

    def part(self, width: int) -> Part | None:
        """Return how `width` columns are shared out; None if there are fewer than ranks: then each has all of them."""
        unit = next((unit for unit in UNITS if width // unit >= SPARE * self.world), 1)
        num = -(-width // unit)
        if num < self.world:
            return None
        ends = [min(width, num * rank // self.world * unit) for rank in range(self.world + 1)]
        return Part(width, tuple(itertools.pairwise(ends)))

    def layout(self, widths: Sequence[int]) -> Layout | None:
        """Return the shares of parts one after the other, each shared out by itself; None if one cannot be."""
        parts = [self.part(width) for width in widths]
        return None if None in parts else Layout(tuple(part for part in parts if part is not None))

    def share(self, num_heads: int, num_kv_heads: int, rank: int | None = None) -> HeadShare:
        """Return the heads of a rank, by default of this one: all queries of some KV heads, or where there are more
        ranks than KV heads, some queries of one.

        Raises `RequestError` for fewer heads than ranks.
        """
        rank, world = self.rank if rank is None else rank, self.world
        if num_heads < world:
            bound = f"at most {num_heads}, the attention heads of a layer of the model"
            raise RequestError("tensor_parallel_size", world, bound)
        each = num_heads // num_kv_heads
        if world <= num_kv_heads:
            first, last = (num_kv_heads * at // world for at in (rank, rank + 1))
            return HeadShare(first * each, (last - first) * each, first, last - first)
        # KV head k belongs to the ranks from owners[k] to owners[k + 1] - 1.
        owners = [-(-world * kv // num_kv_heads) for kv in range(num_kv_heads + 1)]
        kv = next(kv for kv in range(num_kv_heads) if owners[kv] <= rank < owners[kv + 1])
        place, num = rank - owners[kv], owners[kv + 1] - owners[kv]
        first, last = (each * at // num for at in (place, place + 1))
        return HeadShare(kv * each + first, last - first, kv, 1)

    def heads(self, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int) -> Layout:
        """Return the shares of a row of queries, keys and values; without queries or without keys and values if there
        are no such heads."""
        shares = [self.share(num_heads, num_kv_heads, rank) for rank in range(self.world)]
        sizes = ((num_heads, head_dim, 0), (num_kv_heads, head_dim, 2), (num_kv_heads, value_dim, 2))
        parts = [
            Part(num * size, tuple((share[at] * size, (share[at] + share[at + 1]) * size) for share in shares))
            for num, size, at in sizes
        ]
        return Layout(tuple(parts))

    def experts(self, num: int) -> Bounds:
        """Return the experts of this rank, of `num` of a layer. Raises `RequestError` for fewer experts than ranks."""
        if num < self.world:
            bound = f"at most {num} with enable_expert_parallel, the experts of a layer of the model"
            raise RequestError("tensor_parallel_size", self.world, bound)
        return num * self.rank // self.world, num * (self.rank + 1) // self.world

    def cached_heads(self, num_kv_heads: int) -> Bounds:
        """Return the KV heads that this rank keeps in its cache."""
        if self.world <= num_kv_heads:
            return num_kv_heads * self.rank // self.world, num_kv_heads * (self.rank + 1) // self.world
        share = self.share(num_kv_heads * self.world, num_kv_heads)
        return share.first_kv, share.first_kv + 1


class Seat(NamedTuple):
    """A rank's place among the others: its plan, the address of its native group (`_native.Ranks`), which must outlive
    the tapes, and the bytes of one row that a gather has room for."""

    plan: Plan
    group: int
    most_row_bytes: int


class DeviceSeat(NamedTuple):
    """As `Seat`, for a rank that has a device to itself. exchange: moves numbers between the devices
    (`backends.cuda.gathers.Exchange`)."""

    plan: Plan
    exchange: Any
