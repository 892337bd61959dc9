"""Ranks that break the law on purpose, for negative controls. As a program (`MODE FD`) it is the process of a rank."""

from __future__ import annotations

import sys
from typing import Any

from headrace.backends.cpu.ranks import RankOps, RankValue
from headrace.backends.cpu.shares import rank_matrix
from headrace.parallel.plan import Layout, Part
from headrace.quant.arrays import cast
from headrace.quant.base import QWeight, source_of

spans, linear = Layout.spans, RankOps.linear


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
    own = self.inner.matrix(source_of([QWeight(weights)], "part"))
    product = self.inner.linear(self.graph.columns(self.whole(x), begin, end - begin), own)
    side_by_side = Part(world * width, tuple((r * width, (r + 1) * width) for r in range(world)))
    partial = self._gathered(product, Layout((side_by_side,)))
    total = self.graph.columns(partial, 0, width)
    for r in range(1, world):
        total = self.graph.add(total, self.graph.columns(partial, r * width, width))
    return RankValue(self, total)


def keep_whole(weights: Any) -> None:
    """Have ranks read the last matrices of MLPs whole."""
    layout_of = weights._layout
    linear_of = weights.linear

    def read(self: Any, names: list[str], *args: Any, **flags: Any) -> Any:
        if names[0].endswith("down_proj"):
            self._layout = lambda num_outs, cut: None
            try:
                return linear_of(self, names, *args, **flags)
            finally:
                del self._layout
        return linear_of(self, names, *args, **flags)

    assert layout_of
    weights.linear = read


def patch(mode: str, setattr_: Any = setattr) -> None:
    """Break the law in this process: "reverse" or "sum"; "right" breaks nothing."""
    from headrace.parallel.sharding import RankWeights

    if mode == "reverse":
        setattr_(Layout, "spans", gather_in_reverse)
    elif mode == "sum":
        before = RankWeights.linear
        keep_whole(RankWeights)
        changed = RankWeights.linear
        RankWeights.linear = before  # type: ignore[method-assign]
        setattr_(RankWeights, "linear", changed)
        setattr_(RankOps, "linear", sum_over_ranks)


if __name__ == "__main__":
    from headrace.engine import rank

    patch(sys.argv[1])
    sys.exit(rank.main(int(sys.argv[2])))
