"""`SplitOps`: one rank's operators, around a backend's: of each product the rank computes some columns only.

A value is whole, or split: then this rank has the columns of its share (`backends.shares.Layout`). Operators on
each number by itself, on heads, and products take or give split values; all others gather first, so that every model
runs, whatever its operators. No sum is cut and none crosses a rank, so no bit depends on how many there are (ADR 0037).
A subclass has the parts that differ by backend (matrices, products, gathers). Knows values, matrices and layouts; must
not know models or processes. Called by models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.base import (
    Activation,
    Array,
    Cache,
    HeadForm,
    HeadNorm,
    Heads,
    LayerShape,
    Matrix,
    RopeTable,
    Scoring,
)
from headrace.backends.graph import Graph, Value
from headrace.backends.shares import Bounds, Layout, Part, Plan
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.step import StepRows
from headrace.protocol.errors import CheckpointError
from headrace.quant.base import Inputs, MatrixSource, QWeight, concatenated


@dataclass(frozen=True, slots=True, eq=False)
class RankMatrix:
    """This rank's outputs of a linear layer, a matrix of the backend (`local`); all of them where `layout` is None."""

    local: Any
    num_in: int
    num_out: int
    layout: Layout | None


def rank_matrix(matrix: Matrix) -> RankMatrix:
    if not isinstance(matrix, RankMatrix):
        raise TypeError(f"a matrix that belongs to no rank: {type(matrix).__name__}")
    return matrix


class SomeRows:
    """A `MatrixSource` of some rows of another, in the order of `bounds`."""

    def __init__(self, source: MatrixSource, bounds: Sequence[Bounds]) -> None:
        self._source, self._bounds = source, bounds
        self.name, self.num_in, self.scheme = source.name, source.num_in, source.scheme
        self.num_out = sum(end - begin for begin, end in bounds)
        self.columns, self.permutation = source.columns, source.permutation
        self.inputs: Sequence[tuple[int, Inputs | None]] = ()

    def slab(self, first: int, last: int) -> QWeight:
        pieces, start = [], 0
        for begin, end in self._bounds:
            low, high = max(first, start), min(last, start + end - begin)
            if low < high:
                pieces.append(self._source.slab(begin + low - start, begin + high - start))
            start += end - begin
        return concatenated(pieces)


@dataclass(slots=True, eq=False)
class RankValue:
    """Rows that are whole (`full`), or of which this rank has the columns of `layout` (`local`), or both. `coded`: all
    columns, as codes without floats, by the size of the codes' groups."""

    ops: SplitOps
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


class SplitOps(ABC):
    """`Ops` around recording ones (`inner`)."""

    inner: Any
    splits_experts = True
    adapters = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # The parts of the layers that are about to be made, in order; None: they are not shared out.
        self._parts: list[Part] | None = None

    # The parts that differ by backend.

    @abstractmethod
    def gathered(self, x: Value, layout: Layout) -> Value:
        """Return the whole rows of which each rank has the columns that `layout` gives it."""

    @abstractmethod
    def picked(self, x: Value, bounds: Sequence[Bounds]) -> Value:
        """Return a copy of some columns of a value."""

    @property
    def graph(self) -> Graph:
        graph: Graph = self.inner.graph
        return graph

    @property
    def weight_bytes(self) -> int:
        num_bytes: int = self.inner.weight_bytes
        return num_bytes

    def begin(self) -> None:
        self.inner.begin()

    def cache_shapes(self, model: Any, rank: int | None = None) -> list[LayerShape]:
        """Return the shapes of a rank's cache for each layer, by default this one's: its KV heads; states are whole."""
        plan = self.plan if rank is None else self.plan._replace(rank=rank)
        shapes = []
        for shape in model.cache_shapes:
            first, last = plan.cached_heads(shape.num_kv_heads) if shape.num_kv_heads else (0, 0)
            shapes.append(shape._replace(num_kv_heads=last - first))
        return shapes

    def every_cache(self, model: Any) -> list[list[LayerShape]]:
        """Return the shapes of the caches of all ranks."""
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

    # Whole and split values.

    def value(self, x: Any) -> RankValue:
        return x if isinstance(x, RankValue) else RankValue(self, x)

    def whole(self, x: Any) -> Value:
        """Return all columns of a value, gathered if need be."""
        x = self.value(x)
        if x.full is None:
            x.full = self.gathered(x.local, x.layout)
        full: Value = x.full
        return full

    def _full(self, value: Value) -> RankValue:
        return RankValue(self, value)

    def _split(self, value: Value, layout: Layout) -> RankValue:
        return RankValue(self, local=value, layout=layout)

    def _aligned(self, x: RankValue, y: RankValue) -> tuple[Value, Value, Layout | None]:
        """Return the same columns of two values of one width: this rank's columns, if either value has no others."""
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

    def embedding(self, ids: Array, table: Array, scale: float = 1.0) -> RankValue:
        return self._full(self.inner.embedding(ids, table, scale))

    def select(self, x: Any, rows: Array) -> RankValue:
        return self._full(self.inner.select(self.whole(x), rows))

    def rms_norm(self, x: Any, weight: Array | None, eps: float, offset: float = 0.0, heads: int = 1) -> RankValue:
        return self._full(self.inner.rms_norm(self.whole(x), weight, eps, offset, heads))

    def layer_norm(self, x: Any, weight: Array, bias: Array | None, eps: float, offset: float = 0.0) -> RankValue:
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

    def by_head(self, x: Any, matrices: Sequence[Matrix], tail: int = 0) -> RankValue:
        ranked = [rank_matrix(matrix) for matrix in matrices]
        share, num = self.plan.share(len(ranked), 1), len(ranked)
        width = ranked[0].num_in + tail
        local = self._of_heads(self.value(x), num, width)
        locals_ = [matrix.local for matrix in ranked[share.first : share.first + share.num]]
        out = self.inner.by_head(local, locals_, tail)
        return self._split(out, self._heads_of_queries(num, 1, out.width // share.num))

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
        self, qkv: Any, heads: Heads, rows: StepRows, cache: Cache, form: HeadForm = HeadForm()
    ) -> RankValue:
        x = self.value(qkv)
        if not heads.num_heads:
            if self.plan.cached_heads(heads.num_kv_heads) != (0, heads.num_kv_heads):
                raise CheckpointError("ranks can not share out keys without queries of several heads")
            stored = self.inner.rope_store(self.whole(x), heads, rows, cache, form)
            return self._full(stored)
        share = self.plan.share(heads.num_heads, heads.num_kv_heads)
        layout = self.plan.heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.value_size)
        local = (
            x.split[0]
            if x.split is not None and x.split[1] == layout
            else self.picked(self.whole(x), layout.bounds(self.plan.rank))
        )
        local_heads = heads._replace(num_heads=share.num, num_kv_heads=share.num_kv)
        query = self.inner.rope_store(local, local_heads, rows, cache, form)
        return self._split(query, Layout(layout.parts[:1]))

    def attention(self, query: Any, heads: Heads, rows: StepRows, cache: Cache, scoring: Scoring) -> RankValue:
        num, num_kv = heads.num_heads, heads.num_kv_heads
        share = self.plan.share(num, num_kv)
        local = self._of_heads(self.value(query), num, heads.head_dim, num_kv)
        local_heads = heads._replace(num_heads=share.num, num_kv_heads=share.num_kv)
        by_head = {name: getattr(scoring, name) for name in ("sinks", "bias")}
        mine = slice(share.first, share.first + share.num)
        scoring = scoring._replace(**{name: part[mine] for name, part in by_head.items() if part is not None})
        out = self.inner.attention(local, local_heads, rows, cache, scoring)
        return self._split(out, self._heads_of_queries(num, num_kv, heads.value_size))

    # Layers with a state: each rank has all of it.

    def conv(
        self, x: Any, weight: Array, bias: Array | None, kind: Activation, rows: StepRows, state: Array
    ) -> RankValue:
        return self._full(self.inner.conv(self.whole(x), weight, bias, kind, rows, state))

    def delta(self, inputs: DeltaInputs, heads: StateHeads, rows: StepRows, state: Array, scale: float) -> RankValue:
        whole = DeltaInputs(*(self.whole(part) for part in inputs))
        return self._full(self.inner.delta(whole, heads, rows, state, scale))

    def scan(self, inputs: ScanInputs, heads: StateHeads, rows: StepRows, state: Array) -> RankValue:
        x, b, c, dt = (self.whole(part) for part in inputs[:4])
        return self._full(self.inner.scan(ScanInputs(x, b, c, dt, inputs.a, inputs.d), heads, rows, state))

    def softplus(
        self, x: Any, bias: Array, factor: Array | None = None, low: float = 0.0, high: float = math.inf
    ) -> RankValue:
        return self._full(self.inner.softplus(self.whole(x), bias, factor, low, high))
