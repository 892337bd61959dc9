"""`RankOps`: the operators of one rank of several on a CPU: its matrices, its products, and the gathers of their codes.

A value between two products that is quantised for the second one is gathered as codes (ADR 0037). Knows values,
matrices and layouts; must not know models or processes. Called by models and by the programs of this backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.base import ExpertLayer, Matrix
from headrace.backends.cpu.experts import Experts, Share
from headrace.backends.cpu.gathers import Gathers
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack, parts_of
from headrace.backends.cpu.ops import F32, CpuOps
from headrace.backends.cpu.products import Pair
from headrace.backends.cpu.shares import panels, some_rows, without_weights
from headrace.backends.graph import Value
from headrace.backends.shares import Bounds, Layout, Seat
from headrace.backends.split import RankMatrix, RankValue, SomeRows, SplitOps, rank_matrix
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.cpu.matrix import PackedRecord
    from headrace.quant.base import MatrixSource


class RankOps(SplitOps):
    """`SplitOps` around `CpuOps`."""

    inner: CpuOps

    def __init__(self, inner: CpuOps, seat: Seat) -> None:
        super().__init__(seat.plan)
        self.inner, self.gathers = inner, Gathers(inner, seat)
        # Whether the expert whose layers are about to be made is this rank's; None: no expert's layers are made.
        self._has_expert: bool | None = None
        self._layouts: dict[CpuMatrix | CpuStack, Layout] = {}

    @property
    def matrices(self) -> list[CpuMatrix | CpuStack]:
        return self.inner.matrices

    @property
    def pairs(self) -> list[Pair] | None:
        return self.inner.pairs

    @pairs.setter
    def pairs(self, pairs: list[Pair] | None) -> None:
        self.inner.pairs = pairs

    @property
    def wide(self) -> set[CpuMatrix]:
        return self.inner.wide

    @wide.setter
    def wide(self, wide: set[CpuMatrix]) -> None:
        self.inner.wide = wide

    # Matrices.

    @contextmanager
    def of_expert(self, expert_id: int, num: int) -> Iterator[None]:
        """Make the matrices inside as one expert's, of `num`: whole if this rank has the expert, else not read.

        Raises `RequestError` for fewer experts than ranks."""
        first, last = self.plan.experts(num)
        self._has_expert = first <= expert_id < last
        try:
            yield
        finally:
            self._has_expert = None

    def matrix(self, source: MatrixSource, bias: F32 | None = None) -> RankMatrix:
        if self._has_expert is not None and source.columns is not None:
            # Refused as by one process, and by all ranks.
            raise CheckpointError(f"{source.name}: the native kernels have no experts with outliers; dequantise them")
        if self._has_expert is False:
            return self._elsewhere(source)
        layout = self._next_layout(source.num_out)
        if layout is None:
            return RankMatrix(self.inner.matrix(source, bias), source.num_in, source.num_out, None)
        bounds = layout.bounds(self.plan.rank)
        local = self.inner.matrix(SomeRows(source, bounds), some_rows(bias, bounds))
        return self._known(local, source.num_in, source.num_out, layout)

    def packed(self, record: PackedRecord) -> RankMatrix:
        """Return this rank's panels of a matrix that was packed before, copied.

        Raises `CheckpointError` where the rank's outputs are no whole panels."""
        if self._has_expert is False:
            return self._elsewhere(record)
        layout = self._next_layout(record.num_out)
        if layout is None:
            return RankMatrix(self.inner.packed(record), record.num_in, record.num_out, None)
        part = panels(record, layout.bounds(self.plan.rank), self.plan.rank, self.inner.pool)
        return self._known(self.inner.packed(part), record.num_in, record.num_out, layout)

    def stacked(self, name: str, matrices: Sequence[Matrix]) -> RankMatrix:
        ranked = [rank_matrix(matrix) for matrix in matrices]
        locals_ = [matrix.local for matrix in ranked]
        layouts = [matrix.layout for matrix in ranked if matrix.layout is not None]
        local, num_out = self.inner.stacked(name, locals_), sum(matrix.num_out for matrix in ranked)
        if not layouts:
            return RankMatrix(local, local.num_in, num_out, None)
        layout = Layout(tuple(part for each in layouts for part in each.parts))
        return self._known(local, local.num_in, num_out, layout)

    def _known(self, local: CpuMatrix | CpuStack, num_in: int, num_out: int, layout: Layout) -> RankMatrix:
        self._layouts[local] = layout
        return RankMatrix(local, num_in, num_out, layout)

    def _elsewhere(self, source: MatrixSource | PackedRecord) -> RankMatrix:
        """Return another rank's matrix without its weights: every rank decides by the forms of all ranks' matrices."""
        local = without_weights(source)
        self.inner.matrices.append(local)
        return RankMatrix(local, source.num_in, source.num_out, None)

    # Products, and their operands.

    def gathered(self, x: Value, layout: Layout) -> Value:
        return self.gathers.columns(x, layout)

    def picked(self, x: Value, bounds: Sequence[Bounds]) -> Value:
        columns = np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in bounds])
        return self.inner.permuted(x, columns)

    def operand(self, value: Any, parts: Sequence[CpuMatrix]) -> Value:
        """Return all columns of a value as a product with `parts` takes them: as codes alone if it reads no floats."""
        x = self.value(value)
        groups = {part.act_group for part in parts}
        needs_floats = self.pairs is not None or self.inner.takes_floats(*parts)
        is_plain = all(part.permutation is None and part.outliers is None for part in parts)
        if x.split is not None and len(groups) == 1 and is_plain and not needs_floats:
            (group,), (local, layout) = groups, x.split
            if group not in x.coded and layout.is_grouped(group):
                x.coded[group] = self.gathers.codes(local, layout, group)
            if group in x.coded:
                return x.coded[group]
        return self.whole(x)

    def linear(self, x: Any, matrix: Matrix) -> RankValue:
        ranked = rank_matrix(matrix)
        num_pairs = len(self.pairs or ())
        out = self.inner.linear(self.operand(x, parts_of(ranked.local)), ranked.local)
        self._gather_pairs(num_pairs)
        return self._as(out, ranked.layout)

    def experts(self, x: Any, layer: ExpertLayer, seen: Any = None) -> RankValue:
        first, second = ([rank_matrix(matrix) for matrix in part] for part in (layer.gate_up, layer.down))
        takes = [part for matrix in second for part in parts_of(matrix.local)]
        act = self.gated if layer.has_gate else self.activation

        def activation(y: Value) -> Value:
            return self.operand(act(self._as(y, first[0].layout), layer.kind), takes)

        logits = self.whole(self.linear(x if seen is None else seen, layer.router))
        num_pairs = len(self.pairs or ())
        share = None
        if self.plan.whole_experts:
            share = Share(self.plan.experts(layer.router.num_out), self.gathers.rows)
            if any(matrix.layout is not None for matrix in (*first, *second)):
                raise ValueError(f"{first[0].local.name}: the model file does not say which expert has it (`cut`)")
        mixture = Experts(self.inner, layer.routing, layer.router.num_out, share)
        out = mixture.mix(self.whole(x), logits, [m.local for m in first], [m.local for m in second], activation)
        self._gather_pairs(num_pairs)
        return self._as(out, second[0].layout)

    def _gather_pairs(self, first: int) -> None:
        """Gather both products of the pairs from `first` on: the form of a matrix is chosen by all columns of its rows,
        so that all ranks choose alike, and as one rank would."""
        if self.pairs is None:
            return
        for i in range(first, len(self.pairs)):
            pair = self.pairs[i]
            layout = self._layouts.get(pair.matrices[0])
            if layout is not None:
                wide = self.graph.columns(pair.wide, pair.column, pair.narrow.width)
                pair = pair._replace(
                    narrow=self.gathers.columns(pair.narrow, layout),
                    wide=self.gathers.columns(wide, layout),
                    column=0,
                )
            last = len(self.graph.nodes) - 1
            pair.narrow.buffer.last = pair.wide.buffer.last = last
            self.pairs[i] = pair._replace(last=last)
