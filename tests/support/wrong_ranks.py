"""Ranks that break the law on purpose, for negative controls. As a program (`MODE FD`) it is the process of a rank."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headrace.backends.cpu.gathers import Gathers
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.shares import Layout, Part
from headrace.backends.split import RankValue, rank_matrix
from headrace.models.weights import Linear
from headrace.quant.arrays import cast
from headrace.quant.base import QWeight, source_of

spans, linear, experts, rows = Layout.spans, RankOps.linear, RankOps.experts, Gathers.rows
SMALL_SLOT_BYTES = 4 * 4096


def gather_in_reverse(self: Layout, rank: int) -> list[tuple[int, int, int]]:
    """The columns of the first of two ranks where those of the second belong, where there are as many."""
    right = spans(self, rank)
    if len(right) != 1 or len({part.num(r) for part in self.parts for r in range(len(part.bounds))}) != 1:
        return right
    ((column, at, num),) = right
    return [(column, self.width - at - num, num)]


def sum_over_ranks(self: RankOps, x: Any, matrix: Any) -> RankValue:
    """The last product of an MLP as most engines split it: by inputs, with a sum over the ranks."""
    ranked = rank_matrix(matrix)
    if not ranked.local.name.endswith("down_proj") or self.pairs is not None:
        return linear(self, x, matrix)
    world, rank, width = self.plan.world, self.plan.rank, ranked.num_out
    whole = Layout((Part(width, tuple((0, width) for _ in range(world))),))
    if ranked.layout is not None and ranked.layout != whole:
        raise ValueError("the control reads whole matrices")
    part = self.plan.part(ranked.num_in)
    assert part is not None
    begin, end = part.bounds[rank]
    weights = cast(ranked.local.dense()[:, begin:end], "bfloat16")
    part_matrix = self.inner.matrix(source_of([QWeight(weights)], "part"))
    product = self.inner.linear(self.graph.columns(self.whole(x), begin, end - begin), part_matrix)
    side_by_side = Part(world * width, tuple((r * width, (r + 1) * width) for r in range(world)))
    return added(self, product, Layout((side_by_side,)))


def added(self: RankOps, product: Any, side_by_side: Layout) -> RankValue:
    """The sum of what the ranks have of rows, in their order."""
    partial, width = self.gathers.columns(product, side_by_side), product.width
    total = self.graph.columns(partial, 0, width)
    for r in range(1, self.plan.world):
        total = self.graph.add(total, self.graph.columns(partial, r * width, width))
    return RankValue(self, total)


def sum_of_experts(self: RankOps, x: Any, layer: Any, seen: Any = None) -> RankValue:
    """A mixture as most engines split it: each rank adds what its experts make, and the sums are added in the order of
    ranks. The weights of the other ranks' experts are zeros here, which change no sum."""
    num, world, routing = layer.router.num_out, self.plan.world, layer.routing
    first, last = self.plan.experts(num)
    values = np.zeros(num, np.float32)
    values[first:last] = 1 if routing.factors is None else routing.factors[first:last]
    product = self.whole(experts(self, x, layer._replace(routing=routing._replace(factors=values)), seen))
    # As a value of its own: the mixture's may have got what else is added to it.
    width = product.width
    return added(
        self, product, Layout((Part(world * width, tuple((r * width, (r + 1) * width) for r in range(world))),))
    )


def rows_too_late(self: Gathers, x: Any, first: Any) -> Any:
    """The rows of pairs where those of the next expert begin."""
    return rows(self, x, first[1:])


def keep_whole(weights: Any) -> None:
    """Have ranks read the last matrices of MLPs whole."""
    layout_of = weights._layout
    matrix_of = weights.matrix

    def read(self: Any, linear: Linear) -> Any:
        if linear.names[0].endswith("down_proj"):
            self._layout = lambda num_outs, cut: None
            try:
                return matrix_of(self, linear)
            finally:
                del self._layout
        return matrix_of(self, linear)

    assert layout_of
    weights.matrix = read


def patch(mode: str, setattr_: Any = setattr) -> None:
    """Break the law in this process: "reverse", "sum", "sum of experts" or "late"; "right" breaks nothing, and "small"
    neither, where a gather takes several portions."""
    import headrace.engine.rank
    import headrace.engine.ranks
    import headrace.parallel.group
    from headrace.parallel.sharding import RankWeights

    if mode == "reverse":
        setattr_(Layout, "spans", gather_in_reverse)
    elif mode == "sum":
        before = RankWeights.matrix
        keep_whole(RankWeights)
        changed = RankWeights.matrix
        RankWeights.matrix = before  # type: ignore[method-assign]
        setattr_(RankWeights, "matrix", changed)
        setattr_(RankOps, "linear", sum_over_ranks)
    elif mode == "sum of experts":
        setattr_(RankOps, "experts", sum_of_experts)
    elif mode == "late":
        setattr_(Gathers, "rows", rows_too_late)
    elif mode == "small":
        for module in (headrace.engine.rank, headrace.engine.ranks, headrace.parallel.group):
            setattr_(module, "SLOT_BYTES", SMALL_SLOT_BYTES)


if __name__ == "__main__":
    from headrace.engine import rank

    patch(sys.argv[1])
    sys.exit(rank.main(int(sys.argv[2])))
