"""`Ops` of one rank of several: it records some columns of each product, and gathers where an operator needs all.

A value is whole, or split: then this rank has the columns that its plan gives it (`parallel.plan.Layout`). Operators on
each number by itself, on heads, and products take or give split values; all others gather first, so that every model
runs, whatever it is made of. What follows a product and is quantised for the next one is gathered as codes. No sum is
cut and none crosses a rank, so no bit depends on their number (ADR 0037). Knows values, matrices and layouts; must not
know models or processes. Called by models and by the programs of this backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Activation, HeadNorm, Heads, LayerShape, Matrix, RopeTable, Routing
from headrace.backends.cpu.experts import Experts, Share
from headrace.backends.cpu.gathers import Gathers
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack, parts_of
from headrace.backends.cpu.ops import F32, CpuOps
from headrace.backends.cpu.products import Pair
from headrace.backends.cpu.shares import RankMatrix, SomeRows, panels, rank_matrix, some_rows, without_weights
from headrace.backends.graph import Graph, Value
from headrace.backends.states import StateHeads
from headrace.backends.step import StepRows
from headrace.parallel.plan import Layout, Part, Seat
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.cpu.cache import LayerCache
    from headrace.backends.cpu.matrix import PackedRecord, Table
    from headrace.quant.base import MatrixSource


@dataclass(slots=True, eq=False)
class RankValue:
    """Rows that are whole (`full`), or of which this rank has the columns of `layout` (`local`), or both. `coded`: all
    columns as codes alone, by their group."""

    ops: RankOps
    full: Value | None = None
    local: Value | None = None
    layout: Layout | None = None
    coded: dict[int, Value] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Of the whole row."""
        return self.full.width if self.full is not None else self.layout.width if self.layout is not None else 0

    @property
    def split(self) -> tuple[Value, Layout] | None:
        """This rank's columns, where it has no others."""
        if self.full is not None or self.local is None or self.layout is None:
            return None
        return self.local, self.layout

    def __add__(self, other: RankValue) -> RankValue:
        return self.ops.add(self, other)


class RankOps:
    """`Ops` around those that record (`inner`)."""

    def __init__(self, inner: CpuOps, seat: Seat) -> None:
        self.inner, self.plan, self._gathers = inner, seat.plan, Gathers(inner, seat)
        # The parts of the layers that are about to be made, in order; None: they are not shared out.
        self._parts: list[Part] | None = None
        # Whether the expert whose layers are about to be made is this rank's; None: they are no such expert's.
        self._has_expert: bool | None = None
        self._layouts: dict[CpuMatrix | CpuStack, Layout] = {}

    @property
    def graph(self) -> Graph:
        return self.inner.graph

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes

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

    def begin(self) -> None:
        self.inner.begin()

    def cache_shapes(self, model: Any, rank: int | None = None) -> list[LayerShape]:
        """Return what a rank's cache holds of each layer, by default this one's: its KV heads; states are whole."""
        plan = self.plan if rank is None else self.plan._replace(rank=rank)
        shapes = []
        for shape in model.cache_shapes:
            first, last = plan.cached_heads(shape.num_kv_heads) if shape.num_kv_heads else (0, 0)
            shapes.append(shape._replace(num_kv_heads=last - first))
        return shapes

    def every_cache(self, model: Any) -> list[list[LayerShape]]:
        """Return what the caches of all ranks hold."""
        return [self.cache_shapes(model, rank) for rank in range(self.plan.world)]

    # Matrices.

    @contextmanager
    def sharing(self, layout: Layout | None) -> Iterator[None]:
        """Share out the outputs of the matrices that are made inside, one after the other, as `layout` says."""
        self._parts = None if layout is None else list(layout.parts)
        try:
            yield
        finally:
            self._parts = None

    @contextmanager
    def of_expert(self, expert_id: int, num: int) -> Iterator[None]:
        """The matrices that are made inside belong to one expert of `num`: whole if this rank has it, else not read.

        Raises `RequestError` for fewer experts than ranks."""
        first, last = self.plan.experts(num)
        self._has_expert = first <= expert_id < last
        try:
            yield
        finally:
            self._has_expert = None

    def _next_layout(self, num_out: int) -> Layout | None:
        if self._parts is None:
            return None
        parts: list[Part] = []
        while sum(part.width for part in parts) < num_out:
            parts.append(self._parts.pop(0))
        layout = Layout(tuple(parts))
        if layout.width != num_out:
            raise ValueError(f"a matrix of {num_out} outputs for parts of {layout.width}")
        return layout

    def matrix(self, source: MatrixSource, bias: F32 | None = None) -> RankMatrix:
        if self._has_expert is not None and source.columns is not None:
            # As one process refuses them, and here on all ranks.
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

        Raises `CheckpointError` where they are no whole panels."""
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

    def _elsewhere(self, source: MatrixSource | PackedRecord) -> RankMatrix:
        """Return a matrix of another rank, which is here without its weights: all ranks decide by the forms of all."""
        local = without_weights(source)
        self.inner.matrices.append(local)
        return RankMatrix(local, source.num_in, source.num_out, None)

    def _known(self, local: CpuMatrix | CpuStack, num_in: int, num_out: int, layout: Layout) -> RankMatrix:
        self._layouts[local] = layout
        return RankMatrix(local, num_in, num_out, layout)

    # Whole and split values.

    def value(self, x: Any) -> RankValue:
        return x if isinstance(x, RankValue) else RankValue(self, x)

    def whole(self, x: Any) -> Value:
        """Return all columns of a value, gathered if need be."""
        x = self.value(x)
        if x.full is None:
            x.full = self._gathers.columns(x.local, x.layout)
        full: Value = x.full
        return full

    def _full(self, value: Value) -> RankValue:
        return RankValue(self, value)

    def _split(self, value: Value, layout: Layout) -> RankValue:
        return RankValue(self, local=value, layout=layout)

    def operand(self, value: Any, parts: Sequence[CpuMatrix]) -> Value:
        """Return all columns of a value as a product with `parts` takes them: as codes alone, where these will do."""
        x = self.value(value)
        groups = {part.act_group for part in parts}
        needs_floats = self.pairs is not None or self.inner.takes_floats(*parts)
        is_plain = all(part.permutation is None and part.outliers is None for part in parts)
        if x.split is not None and len(groups) == 1 and is_plain and not needs_floats:
            (group,), (local, layout) = groups, x.split
            if group not in x.coded and layout.is_grouped(group):
                x.coded[group] = self._gathers.codes(local, layout, group)
            if group in x.coded:
                return x.coded[group]
        return self.whole(x)

    def _aligned(self, x: RankValue, y: RankValue) -> tuple[Value, Value, Layout | None]:
        """Return the same columns of two values of one width: this rank's, if either has no others."""
        for one, other, turned in ((y, x, False), (x, y, True)):
            if one.split is None:
                continue
            local, layout = one.split
            if other.local is not None and other.layout == layout:
                return (local, other.local, layout) if turned else (other.local, local, layout)
            if len(layout.parts) == 1 and other.split is None:
                ((begin, end),) = layout.bounds(self.plan.rank)
                piece = self.graph.columns(self.whole(other), begin, end - begin)
                return (local, piece, layout) if turned else (piece, local, layout)
        return self.whole(x), self.whole(y), None

    def _as(self, value: Value, layout: Layout | None) -> RankValue:
        return self._full(value) if layout is None else self._split(value, layout)

    def add(self, x: Any, y: Any) -> RankValue:
        left, right, layout = self._aligned(self.value(x), self.value(y))
        return self._as(self.graph.add(left, right), layout)

    def _each(self, x: Any, op: Callable[[Value], Value]) -> RankValue:
        """Apply an operator on each number by itself."""
        x = self.value(x)
        if x.split is None:
            return self._full(op(self.whole(x)))
        local, layout = x.split
        return self._split(op(local), layout)

    # Operators on each number, or on all columns.

    def embedding(self, ids: NDArray[np.int32], table: Table, scale: float = 1.0) -> RankValue:
        return self._full(self.inner.embedding(ids, table, scale))

    def select(self, x: Any, rows: NDArray[np.int32]) -> RankValue:
        return self._full(self.inner.select(self.whole(x), rows))

    def rms_norm(self, x: Any, weight: F32 | None, eps: float, offset: float = 0.0, heads: int = 1) -> RankValue:
        return self._full(self.inner.rms_norm(self.whole(x), weight, eps, offset, heads))

    def layer_norm(self, x: Any, weight: F32, bias: F32 | None, eps: float, offset: float = 0.0) -> RankValue:
        return self._full(self.inner.layer_norm(self.whole(x), weight, bias, eps, offset))

    def norm_columns(self, x: Any, first: int, num: int, norm: HeadNorm) -> RankValue:
        return self._full(self.inner.norm_columns(self.whole(x), first, num, norm))

    def softcap(self, x: Any, cap: float) -> RankValue:
        return self._each(x, lambda value: self.inner.softcap(value, cap))

    def activation(self, x: Any, kind: Activation) -> RankValue:
        return self._each(x, lambda value: self.inner.activation(value, kind))

    def xielu(self, x: Any, positive: float, negative: float, beta: float) -> RankValue:
        return self._each(x, lambda value: self.inner.xielu(value, positive, negative, beta))

    def scale(self, x: Any, factor: float) -> RankValue:
        return self._each(x, lambda value: self.inner.scale(value, factor))

    def multiply(self, x: Any, gate: Any, kind: Activation) -> RankValue:
        x, gate = self.value(x), self.value(gate)
        if gate.width == 1:
            one = self.whole(gate)
            return self._each(x, lambda value: self.inner.multiply(value, one, kind))
        left, right, layout = self._aligned(x, gate)
        return self._as(self.inner.multiply(left, right, kind), layout)

    def gated(self, x: Any, kind: Activation) -> RankValue:
        x = self.value(x)
        if x.split is not None:
            local, layout = x.split
            if len(layout.parts) == 2 and layout.parts[0] == layout.parts[1]:
                return self._split(self.inner.gated(local, kind), Layout(layout.parts[:1]))
        return self._full(self.inner.gated(self.whole(x), kind))

    def columns(self, x: Any, first: int, width: int) -> RankValue:
        x = self.value(x)
        if x.split is not None:
            local, layout = x.split
            starts = [sum(part.width for part in layout.parts[:i]) for i in range(len(layout.parts) + 1)]
            if first in starts and first + width in starts:
                parts = layout.parts[starts.index(first) : starts.index(first + width)]
                column = Layout(layout.parts[: starts.index(first)]).num(self.plan.rank)
                piece = Layout(parts)
                return self._split(self.graph.columns(local, column, piece.num(self.plan.rank)), piece)
        return self._full(self.inner.columns(self.whole(x), first, width))

    # Products.

    def linear(self, x: Any, matrix: Matrix) -> RankValue:
        ranked = rank_matrix(matrix)
        num_pairs = len(self.pairs or ())
        out = self.inner.linear(self.operand(x, parts_of(ranked.local)), ranked.local)
        self._gather_pairs(num_pairs)
        return self._as(out, ranked.layout)

    def by_head(self, x: Any, matrices: Sequence[Matrix], tail: int = 0) -> RankValue:
        ranked = [rank_matrix(matrix) for matrix in matrices]
        share, num = self.plan.share(len(ranked), 1), len(ranked)
        width = ranked[0].num_in + tail
        local = self._of_heads(self.value(x), num, width)
        locals_ = [matrix.local for matrix in ranked[share.first : share.first + share.num]]
        out = self.inner.by_head(local, locals_, tail)
        return self._split(out, self._heads_of_queries(num, 1, out.width // share.num))

    def experts(
        self,
        x: Any,
        router: Matrix,
        routing: Routing,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        kind: Activation,
        seen: Any = None,
    ) -> RankValue:
        first, second = ([rank_matrix(matrix) for matrix in part] for part in (gate_up, down))
        takes = [part for matrix in second for part in parts_of(matrix.local)]
        act = self.activation if first[0].num_out == second[0].num_in else self.gated

        def bend(y: Value) -> Value:
            return self.operand(act(self._as(y, first[0].layout), kind), takes)

        logits = self.whole(self.linear(x if seen is None else seen, router))
        num_pairs = len(self.pairs or ())
        share = None
        if self.plan.whole_experts:
            share = Share(self.plan.experts(router.num_out), self._gathers.rows)
            if any(matrix.layout is not None for matrix in (*first, *second)):
                raise ValueError(f"{first[0].local.name}: the model file does not say which expert has it (`cut`)")
        mixture = Experts(self.inner, routing, router.num_out, share)
        out = mixture.mix(self.whole(x), logits, [m.local for m in first], [m.local for m in second], bend)
        self._gather_pairs(num_pairs)
        return self._as(out, second[0].layout)

    def _gather_pairs(self, first: int) -> None:
        """Gather both products of the pairs from `first` on: which form suits a matrix is decided by all its rows'
        columns, so that all ranks decide alike, and as one rank would."""
        if self.pairs is None:
            return
        for i in range(first, len(self.pairs)):
            pair = self.pairs[i]
            layout = self._layouts.get(pair.matrices[0])
            if layout is not None:
                wide = self.graph.columns(pair.wide, pair.column, pair.narrow.width)
                pair = pair._replace(
                    narrow=self._gathers.columns(pair.narrow, layout),
                    wide=self._gathers.columns(wide, layout),
                    column=0,
                )
            last = len(self.graph.nodes) - 1
            pair.narrow.buffer.last = pair.wide.buffer.last = last
            self.pairs[i] = pair._replace(last=last)

    # Heads.

    def _heads_of_queries(self, num: int, num_kv: int, size: int) -> Layout:
        shares = [self.plan.share(num, num_kv, rank) for rank in range(self.plan.world)]
        return Layout((Part(num * size, tuple((s.first * size, (s.first + s.num) * size) for s in shares)),))

    def _of_heads(self, x: RankValue, num: int, size: int, num_kv: int = 1) -> Value:
        """Return this rank's heads of x, of `size` numbers each."""
        layout = self._heads_of_queries(num, num_kv, size)
        if x.split is not None and x.split[1] == layout:
            return x.split[0]
        ((begin, end),) = layout.bounds(self.plan.rank)
        return self.graph.columns(self.whole(x), begin, end - begin)

    def rope(self, x: Any, num_heads: int, head_dim: int, rows: StepRows, rope_table: RopeTable) -> RankValue:
        x = self.value(x)
        if x.split is not None and x.width == num_heads * head_dim:
            local, layout = x.split
            is_aligned = len(layout.parts) == 1 and not any(
                at % head_dim for bounds in layout.parts[0].bounds for at in bounds
            )
            if is_aligned:
                num = layout.num(self.plan.rank) // head_dim
                return self._split(self.inner.rope(local, num, head_dim, rows, rope_table), layout)
        return self._full(self.inner.rope(self.whole(x), num_heads, head_dim, rows, rope_table))

    def rope_store(
        self,
        qkv: Any,
        heads: Heads,
        rows: StepRows,
        cache: LayerCache,
        rope_table: RopeTable | None = None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> RankValue:
        x = self.value(qkv)
        if not heads.num_heads:
            if self.plan.cached_heads(heads.num_kv_heads) != (0, heads.num_kv_heads):
                raise CheckpointError("ranks can not share out keys without queries of several heads")
            stored = self.inner.rope_store(self.whole(x), heads, rows, cache, rope_table, q_norm, k_norm)
            return self._full(stored)
        share = self.plan.share(heads.num_heads, heads.num_kv_heads)
        layout = self.plan.heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.value_size)
        local = x.split[0] if x.split is not None and x.split[1] == layout else self._picked(self.whole(x), layout)
        local_heads = heads._replace(num_heads=share.num, num_kv_heads=share.num_kv)
        query = self.inner.rope_store(local, local_heads, rows, cache, rope_table, q_norm, k_norm)
        return self._split(query, Layout(layout.parts[:1]))

    def _picked(self, x: Value, layout: Layout) -> Value:
        """Return a copy of this rank's columns of a whole value."""
        bounds = layout.bounds(self.plan.rank)
        columns = np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in bounds])
        return self.inner.permuted(x, columns)

    def attention(
        self,
        query: Any,
        heads: Heads,
        rows: StepRows,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: F32 | None = None,
        chunked: bool = False,
    ) -> RankValue:
        num, num_kv = heads.num_heads, heads.num_kv_heads
        share = self.plan.share(num, num_kv)
        local = self._of_heads(self.value(query), num, heads.head_dim, num_kv)
        local_heads = heads._replace(num_heads=share.num, num_kv_heads=share.num_kv)
        own_sinks = None if sinks is None else np.ascontiguousarray(sinks[share.first : share.first + share.num])
        out = self.inner.attention(local, local_heads, rows, cache, scale, window, softcap, own_sinks, chunked)
        return self._split(out, self._heads_of_queries(num, num_kv, heads.value_size))

    # Layers with a state: each rank has all of it.

    def conv(self, x: Any, weight: F32, bias: F32 | None, kind: Activation, rows: StepRows, state: F32) -> RankValue:
        return self._full(self.inner.conv(self.whole(x), weight, bias, kind, rows, state))

    def delta(
        self,
        query: Any,
        key: Any,
        value: Any,
        decay: Any,
        beta: Any,
        heads: StateHeads,
        rows: StepRows,
        state: F32,
        scale: float,
    ) -> RankValue:
        query, key, value, decay, beta = (self.whole(part) for part in (query, key, value, decay, beta))
        return self._full(self.inner.delta(query, key, value, decay, beta, heads, rows, state, scale))

    def scan(
        self,
        x: Any,
        b: Any,
        c: Any,
        dt: Any,
        a: F32,
        d: F32 | None,
        heads: StateHeads,
        rows: StepRows,
        state: F32,
    ) -> RankValue:
        x, b, c, dt = (self.whole(part) for part in (x, b, c, dt))
        return self._full(self.inner.scan(x, b, c, dt, a, d, heads, rows, state))

    def softplus(
        self, x: Any, bias: F32, factor: F32 | None = None, low: float = 0.0, high: float = math.inf
    ) -> RankValue:
        return self._full(self.inner.softplus(self.whole(x), bias, factor, low, high))
