"""Operators that only count: the engine's own model files run over them and need no weights, and no formula here.

`count` makes a model of a config.json with `CountingWeights`, which know sizes alone, and runs one row through
`CountingOps`. Knows operators and matrices; must not know model types. Called by `plan.planner`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import models
from headrace.models.config import ModelConfig
from headrace.models.weights import ByHead, Linear
from headrace.plan.forms import FLOAT_BITS, Forms, kv_bytes
from headrace.protocol.errors import CheckpointError

NUM_POSITIONS = 16
"""Of the rope table that a model makes, which nothing reads."""


class LayerKV(NamedTuple):
    """A layer's reads of each position: keys and values [num_heads, dim], of the last `window` positions at least
    (None: of all). A row multiplies `macs` numbers with each position that it sees. `keeps`: False for a layer that
    reads the cache of another."""

    window: int | None
    num_heads: int
    key_dim: int
    value_dim: int
    macs: int
    keeps: bool = True

    def read_bytes(self, dtype: str) -> float:
        return kv_bytes(self.num_heads, self.key_dim, self.value_dim, dtype)

    def kept_bytes(self, dtype: str) -> float:
        return self.read_bytes(dtype) if self.keeps else 0.0


class CountedMixture(NamedTuple):
    """The experts of a layer: how many, how many a row takes, parameters, bytes of all, and multiplications of one."""

    num: int
    top_k: int
    parameters: int
    num_bytes: float
    macs: int


class Counts(NamedTuple):
    """The parts of a model, by size. Layers that are alike stand once, with their number.

    `tables`: bytes of embeddings, of which a step reads single rows; 0 where the head is the same tensor. `dense`: of
    all that a step reads whole, `head` of the output matrix, which is read for rows with logits. `macs`, `head_macs`:
    multiplications for a row, experts not chosen left out. `state_bytes`: of the states of a sequence, whatever its
    length. `forms`: bytes by form. `widest`: numbers of the widest row but for the logits, which are `vocab_size`.
    `source`: where the counts come from, for the reader.
    """

    parameters: int
    active_parameters: int
    tables: float
    dense: float
    head: float
    macs: int
    head_macs: int
    layers: tuple[tuple[LayerKV, int], ...]
    state_bytes: float
    mixtures: tuple[tuple[CountedMixture, int], ...]
    forms: dict[str, float]
    widest: int
    vocab_size: int
    source: str

    @property
    def weight_bytes(self) -> float:
        experts = sum(each.num_bytes * num for each, num in self.mixtures)
        return self.tables + self.dense + self.head + experts

    def kv_token_bytes(self, dtype: str) -> float:
        """Return the bytes that a position takes over all layers."""
        return sum(layer.kept_bytes(dtype) * num for layer, num in self.layers)

    def kv_bytes(self, context: int, dtype: str, *, windowed: bool) -> float:
        """Return the bytes of a sequence of `context` tokens. windowed: layers keep the positions in their windows
        alone."""
        return self.state_bytes + sum(
            layer.kept_bytes(dtype) * num * (min(context, layer.window) if windowed and layer.window else context)
            for layer, num in self.layers
        )


class _Value:
    """Rows of `width` numbers, none of which exists."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __add__(self, other: _Value) -> _Value:
        return self


class _Table(NamedTuple):
    width: int


class _Matrix(NamedTuple):
    """A linear layer by its sizes: `num_bytes` with its bias, of `parameters` numbers."""

    name: str
    num_in: int
    num_out: int
    parameters: int
    num_bytes: float
    form: str


class _Cache:
    """One layer's cache: how it is looked at."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []
        self.macs = 0


class _State(NamedTuple):
    """An array of a layer's state in one slot."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _States(NamedTuple):
    """One layer's state."""

    arrays: list[_State]


class CountingOps:
    """`backends.base.Ops` whose arrays are widths. `read` has each matrix that rows went through."""

    def __init__(self) -> None:
        self.weight_bytes = 0
        self.matrices: list[Any] = []
        self.macs = 0
        self.widest = 0
        self.read: dict[int, _Matrix] = {}
        self.mixtures: Counter[CountedMixture] = Counter()

    def __getattr__(self, name: str) -> Any:
        raise CheckpointError(f"the planner does not count the operator {name} that this model uses")

    def _new(self, width: int) -> _Value:
        self.widest = max(self.widest, width)
        return _Value(width)

    def linear(self, x: _Value, matrix: _Matrix) -> _Value:
        if x.width != matrix.num_in:
            raise CheckpointError(f"{matrix.name} takes rows of {matrix.num_in} numbers and gets {x.width}")
        self.macs += matrix.num_in * matrix.num_out
        self.read[id(matrix)] = matrix
        return self._new(matrix.num_out)

    def by_head(self, x: _Value, matrices: Sequence[_Matrix], tail: int = 0) -> _Value:
        heads = len(matrices)
        for matrix in matrices:
            self.linear(_Value(x.width // heads - tail), matrix)
        return self._new(heads * (matrices[0].num_out + tail))

    def embedding(self, ids: Any, table: _Table, scale: float = 1.0) -> _Value:
        return self._new(table.width)

    def select(self, x: _Value, rows: Any) -> _Value:
        return x

    def _same_width(self, x: _Value, *_: Any, **__: Any) -> _Value:
        """Operators that change numbers, and multiply no matrix."""
        return _Value(x.width)

    rms_norm = layer_norm = norm_columns = rope = activation = xielu = softplus = _same_width
    multiply = scale = softcap = _same_width

    def columns(self, x: _Value, first: int, width: int) -> _Value:
        return _Value(width)

    def conv(self, x: _Value, weight: Any, bias: Any, kind: str, rows: Any, state: _State) -> _Value:
        self.macs += state.size + x.width
        return _Value(x.width)

    def delta(self, inputs: Any, heads: Any, rows: Any, state: _State, scale: float) -> _Value:
        """The state is looked up by the key, changed, and looked up by the query."""
        self.macs += 3 * state.size
        return _Value(inputs.value.width)

    def scan(self, inputs: Any, heads: Any, rows: Any, state: _State) -> _Value:
        """The state is changed, and read."""
        self.macs += 2 * state.size
        return _Value(inputs.x.width)

    def rope_store(self, qkv: _Value, heads: Any, rows: Any, cache: _Cache, *_: Any, **__: Any) -> _Value:
        return self._new(heads.num_heads * heads.head_dim)

    def attention(self, query: _Value, heads: Any, rows: Any, cache: _Cache, scoring: Any) -> _Value:
        cache.windows.append(scoring.window)
        cache.macs += heads.num_heads * (heads.head_dim + heads.value_size)
        return self._new(heads.num_heads * heads.value_size)

    def gated(self, x: _Value, kind: str) -> _Value:
        return _Value(x.width // 2)

    def experts(self, x: _Value, layer: Any, seen: _Value | None = None) -> _Value:
        gate_up, down, top_k = layer.gate_up, layer.down, layer.routing.top_k
        self.linear(x if seen is None else seen, layer.router)
        one = gate_up[0].num_in * gate_up[0].num_out + down[0].num_in * down[0].num_out
        self.macs += top_k * one
        matrices = [*gate_up, *down]
        parameters, num_bytes = sum(m.parameters for m in matrices), sum(m.num_bytes for m in matrices)
        self.mixtures[CountedMixture(len(gate_up), top_k, parameters, num_bytes, one)] += 1
        self.widest = max(self.widest, top_k * gate_up[0].num_out)
        return _Value(x.width)


class CountingWeights:
    """`models.weights.Weights` of sizes alone: every tensor is there, each with its bytes in the form that it gets."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self.parameters = 0
        self.tables = 0.0
        self.forms: Counter[str] = Counter()
        self._small = 0.0

    @property
    def small(self) -> float:
        """Bytes of norms and other vectors."""
        return self._small

    def has(self, name: str) -> bool:
        return False

    def has_prefix(self, prefix: str) -> bool:
        return True

    def constant(self, values: Any) -> Any:
        return values

    def constant_table(self, values: Any) -> _Table:
        return _Table(values.shape[1])

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        self.tensor(name, shape)
        return np.zeros(shape, np.float32)

    def tensor(self, name: str, shape: tuple[int, ...]) -> None:
        self._small += self._plain(math.prod(shape))

    def table(self, name: str, shape: tuple[int, int]) -> _Table:
        self.tables += self._plain(math.prod(shape))
        return _Table(shape[1])

    def matrix(self, linear: Linear) -> _Matrix:
        name = linear.names[0]
        form, bits = self._forms.bits(name, linear.num_in, linear.plain)
        return self._matrix(name, linear.num_in, sum(linear.num_outs), form, bits, linear.bias)

    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        return ByHead.separate(self, name, num_in, num_heads, key_dim, value_dim)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[_Table, _Matrix]:
        form, bits = self._forms.head_bits(shape[1])
        if not tied or form != self._forms.dtype:
            self.tables += self._plain(math.prod(shape))
        matrix = self._matrix(head, shape[1], shape[0], form, bits, bias=False)
        if tied and form != self._forms.dtype:
            # The same numbers in two forms.
            self.parameters -= math.prod(shape)
        return _Table(shape[1]), matrix

    def _plain(self, num: int) -> float:
        num_bytes = num * FLOAT_BITS[self._forms.dtype] / 8
        self.parameters += num
        self.forms[self._forms.dtype] += num_bytes  # type: ignore[assignment]
        return num_bytes

    def _matrix(self, name: str, num_in: int, num_out: int, form: str, bits: float, bias: bool) -> _Matrix:
        num_bytes = num_in * num_out * bits / 8
        self.parameters += num_in * num_out
        self.forms[form] += num_bytes  # type: ignore[assignment]
        parameters = num_in * num_out
        if bias:
            num_bytes += self._plain(num_out)
            parameters += num_out
        return _Matrix(name, num_in, num_out, parameters, num_bytes, form)


class _OneRow:
    """The row that goes through a model."""

    token_ids = positions = features = None


ONE_ROW = _OneRow()


def cache_of(shape: Any) -> _Cache | _States:
    """Return the cache of a `backends.base.LayerShape`."""
    return _States([_State(state) for state in shape.states]) if shape.states else _Cache()


def count(values: dict[str, Any], forms: Forms) -> Counts:
    """Return the counts of the model of a config.json, by headrace's own file of its model_type.

    Raises `CheckpointError` for a config that is not valid, for a type that headrace does not run, and for an operator
    that is not counted here.
    """
    ops, weights = CountingOps(), CountingWeights(forms)
    model = models.find(values.get("model_type")).Model(ModelConfig(values), weights, ops, NUM_POSITIONS)
    shapes = model.cache_shapes
    caches = [cache_of(shape) for shape in shapes]
    hidden = model.forward(ONE_ROW, caches)
    macs, num_read, widest = ops.macs, len(ops.read), ops.widest
    logits = model.logits(hidden, None)
    matrices = list(ops.read.values())
    inactive = sum((each.num - each.top_k) * each.parameters // each.num * num for each, num in ops.mixtures.items())
    layers = Counter(
        LayerKV(
            None if None in cache.windows else max(w for w in cache.windows if w is not None),
            shape.num_kv_heads, shape.head_dim, 0 if shape.shares_key else shape.value_size, cache.macs,
            shape.source is None,
        )
        for cache, shape in zip(caches, shapes, strict=True)
        if isinstance(cache, _Cache)
    )  # fmt: skip
    return Counts(
        parameters=weights.parameters,
        active_parameters=weights.parameters - inactive,
        tables=weights.tables,
        dense=sum(matrix.num_bytes for matrix in matrices[:num_read]) + weights.small,
        head=sum(matrix.num_bytes for matrix in matrices[num_read:]),
        macs=macs,
        head_macs=ops.macs - macs,
        layers=tuple(layers.items()),
        state_bytes=sum(4.0 * math.prod(state) for shape in shapes for state in shape.states),
        mixtures=tuple(ops.mixtures.items()),
        forms=dict(weights.forms),
        widest=widest,
        vocab_size=logits.width,
        source=f"headrace's own models/{values['model_type']}.py",
    )
