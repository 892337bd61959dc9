"""`Ops` that record instead of computing: one call of a model's forward pass becomes a `Graph`.

Each method puts the nodes of one operator; their meaning, to the bit, is in csrc/include/kernels.h. Quantisation of
activations and additions to the residual become part of the neighbouring node where its operator allows it. Called by
models; must not know them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import (
    Activation,
    ExpertLayer,
    HeadForm,
    HeadNorm,
    Heads,
    LayerShape,
    Matrix,
    RopeTable,
    Scoring,
)
from headrace.backends.cpu.codes import Quantised, quantised
from headrace.backends.cpu.experts import Experts
from headrace.backends.cpu.heads import by_head
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack, make_matrix, parts_of
from headrace.backends.cpu.memory import Pool
from headrace.backends.cpu.products import FLOAT_KINDS, KINDS, NO_Q, NO_RESIDUAL, Pair, product
from headrace.backends.graph import LOGITS, Graph, Value
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.step import StepRows

if TYPE_CHECKING:
    from headrace.backends.cpu.adapters import CpuAdapters
    from headrace.backends.cpu.cache import LayerCache
    from headrace.backends.cpu.matrix import PackedRecord, Table
    from headrace.quant.base import MatrixSource

F32 = NDArray[np.float32]

ITEM_BYTES = 4
"""Values between operators are float32."""


class CpuOps:
    """Writes to `graph`; `begin` starts a new one."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.graph = Graph(ITEM_BYTES, apart=True)
        self.weight_bytes = 0
        self.matrices: list[CpuMatrix | CpuStack] = []
        self.pool = Pool()
        self.wide: set[CpuMatrix] = set()
        """Matrices of integer codes whose activations stay floats (`activations.choose_activations`)."""
        self.copies = False
        """Whether a packed matrix is copied out of its file: then the file is not read as a whole."""
        self.adapters: CpuAdapters | None = None
        self.pairs: list[Pair] | None = None
        """A list while products are recorded both ways."""

    def begin(self) -> None:
        self.graph = Graph(ITEM_BYTES, apart=True)

    def whole(self, x: Value) -> Value:
        """Return all columns of x, as `ranks.RankOps` does, whose values may have some columns only."""
        return x

    def cache_shapes(self, model: Any) -> Sequence[LayerShape]:
        """Return the shapes of the cache for each layer."""
        shapes: Sequence[LayerShape] = model.cache_shapes
        return shapes

    def every_cache(self, model: Any) -> list[Sequence[LayerShape]]:
        """Return the shapes of the caches of all ranks."""
        return [self.cache_shapes(model)]

    def matrix(self, source: MatrixSource, bias: F32 | None = None) -> CpuMatrix:
        matrix = make_matrix(source, bias, self.pool)
        self.matrices.append(matrix)
        self.weight_bytes += matrix.num_bytes
        return matrix

    def stacked(self, name: str, matrices: Sequence[Matrix]) -> CpuStack:
        parts = tuple(matrix for matrix in matrices if isinstance(matrix, CpuMatrix))
        # They were made last: a search among all would take time by the square of the number of experts.
        del self.matrices[len(self.matrices) - len(parts) :]
        stack = CpuStack(name, parts)
        self.matrices.append(stack)
        return stack

    def packed(self, record: PackedRecord) -> CpuMatrix:
        """Return a matrix that was packed before and is mapped now."""
        data = record.data
        if self.copies:
            data = self.pool.take(len(record.data))
            data[:] = record.data
        matrix = CpuMatrix(
            record.name, record.scheme, data, record.num_in, record.num_out, record.bias,
            permutation=record.permutation,
        )  # fmt: skip
        self.matrices.append(matrix)
        self.weight_bytes += matrix.num_bytes
        return matrix

    def embedding(self, ids: NDArray[np.int32], table: Table, scale: float = 1.0) -> Value:
        out = self.graph.value(table.width, 0)
        fields = {"ids": ids, "table": table.data, "file": table.file, "place": table.place, "type": table.type_code}
        fields |= {"width": table.width, "scale": rounded(scale, self.dtype), "out": out.buffer, "ld_out": out.ld}
        self.graph.put("embedding", out.dim, out, fields)
        return out

    def select(self, x: Value, rows: NDArray[np.int32]) -> Value:
        out = self.graph.value(x.width, LOGITS)
        self.graph.put("select_rows", LOGITS, out, {"rows": rows} | self._in_out(x, out))
        return out

    def rms_norm(self, x: Value, weight: F32 | None, eps: float, offset: float = 0.0, heads: int = 1) -> Value:
        out = self.graph.value(x.width, x.dim)
        width = x.width // heads
        step = width if heads > 1 and weight is not None and weight.size == x.width else 0
        fields = {"weight": weight, "weight_step": step, "eps": eps, "offset": offset, "heads": heads, "width": width}
        self.graph.put("rms_norm", x.dim, out, self._in_out(x, out) | fields | NO_Q)
        if heads > 1:
            out.node = None  # codes go in groups over the whole row, which norms of its parts do not write
        return out

    def layer_norm(self, x: Value, weight: F32, bias: F32 | None, eps: float, offset: float = 0.0) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"weight": weight + np.float32(offset) if offset else weight, "bias": bias, "eps": eps}
        self.graph.put("layer_norm", x.dim, out, self._in_out(x, out) | fields | NO_Q)
        return out

    def norm_columns(self, x: Value, first: int, num: int, norm: HeadNorm) -> Value:
        # In place: the other columns stay where the next operator reads them.
        self.graph.read(x)
        at, width = self.graph.columns(x, first, x.width - first).at, len(norm.weight)
        fields: dict[str, Any] = {"x": at, "ld_x": x.ld, "heads": num, "width": width, "out": at, "ld_out": x.ld}
        fields |= {"weight": norm.weight, "weight_step": 0, "eps": norm.eps, "offset": norm.offset}
        self.graph.put("rms_norm", x.dim, None, fields | NO_Q)
        return Value(self.graph, x.buffer, x.width, x.item_bytes, column=x.column)

    def columns(self, x: Value, first: int, width: int) -> Value:
        return self.graph.columns(x, first, width)

    def softcap(self, x: Value, cap: float) -> Value:
        # In place: the logits of a large vocabulary need not lie there twice.
        buffer = self.graph.read(x)
        fields = {"x": buffer, "ld_x": x.ld, "width": x.width, "cap": cap, "out": buffer, "ld_out": x.ld}
        node = self.graph.put("softcap", x.dim, None, fields)
        return Value(self.graph, x.buffer, x.width, x.item_bytes, node, num_uses=1, column=x.column)

    def activation(self, x: Value, kind: Activation) -> Value:
        out = self.graph.value(x.width, x.dim)
        self.graph.put("activation", x.dim, out, self._in_out(x, out) | {"kind": KINDS[kind]} | NO_Q)
        return out

    def xielu(self, x: Value, positive: float, negative: float, beta: float) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"positive": positive, "negative": negative, "beta": beta}
        self.graph.put("xielu", x.dim, out, self._in_out(x, out) | fields | NO_Q)
        return out

    def gated(self, x: Value, kind: Activation) -> Value:
        out = self.graph.value(x.width // 2, x.dim)
        fields = self._in_out(x, out) | {"width": x.width // 2, "kind": KINDS[kind]}
        self.graph.put("gated", x.dim, out, fields | NO_Q)
        return out

    def multiply(self, x: Value, gate: Value, kind: Activation) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"gate": self.graph.read(gate), "ld_gate": gate.ld, "gate_width": gate.width, "kind": KINDS[kind]}
        self.graph.put("multiply", x.dim, out, self._in_out(x, out) | fields | NO_RESIDUAL)
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self.graph.value(x.width, x.dim)
        self.graph.put("scale", x.dim, out, self._in_out(x, out) | {"factor": factor} | NO_RESIDUAL)
        return out

    def linear(self, x: Value, matrix: Matrix) -> Value:
        weights, adapters = cpu_matrix(matrix), self.adapters
        inner = None if adapters is None else adapters.before(self.graph, x, weights)
        out = self._linear(x, weights)
        if adapters is not None and inner is not None:
            adapters.after(self.graph, inner, weights, out)
        return out

    def _linear(self, x: Value, weights: CpuMatrix | CpuStack) -> Value:
        if isinstance(weights, CpuMatrix):
            return self._part(x, weights)
        out, column = self.graph.value(weights.num_out, x.dim), 0
        for part in weights.parts:
            self._part(x, part, out, column)
            column += part.num_out
        out.node = None  # no node makes all of it, so none can add a residual
        return out

    def _part(self, x: Value, matrix: CpuMatrix, out: Value | None = None, column: int = 0) -> Value:
        """Return the product, in a new value, or in the columns of `out` from `column` on."""
        if matrix.permutation is not None:
            x = self.permuted(x, matrix.permutation)
        if matrix.outliers is None:
            return self._either(x, matrix, out, column)
        # Outliers are multiplied in float; in the rows that are quantised they are exactly zero.
        outliers = self._product(x, None, matrix.outliers.pick)
        rest = x + self._product(outliers, None, matrix.outliers.back)
        product = self._either(rest, matrix, out, column)
        return self._product(outliers, None, matrix.outliers.kept, product, column, adds=True)

    def permuted(
        self, x: Value, columns: NDArray[np.int32], begin: NDArray[np.int32] | None = None, count: int = 1
    ) -> Value:
        """Put each row of x into the order `columns` [count, width]; if there are several, into its expert's order."""
        width = columns.size // count
        out = self.graph.value(width, x.dim)
        fields = {"columns": columns, "begin": begin, "count": count, "width": width}
        self.graph.put("permute", x.dim, out, self._in_out(x, out) | fields | NO_Q)
        return out

    def _either(self, x: Value, matrix: CpuMatrix, out: Value | None, column: int) -> Value:
        """Return the product with int8 activations, or with floats for a matrix of plain numbers or one in `wide`."""
        if self.takes_floats(matrix):
            return self._product(x, None, matrix, out, column)
        codes = quantised(x, matrix.act_group)
        if self.pairs is None:
            return self._product(x, codes, matrix, out, column)
        narrow = self._product(x, codes, matrix)
        wide = self._product(x, None, matrix, out, column)
        wide.node = None  # a residual must not become part of it
        narrow.buffer.last = wide.buffer.last = len(self.graph.nodes) - 1
        self.pairs.append(Pair([matrix], narrow, wide, len(self.graph.nodes) - 1, column=column))
        return wide

    def takes_floats(self, *matrices: CpuMatrix | CpuStack) -> bool:
        """Whether the products of any of the matrices, or of a part of one, take floats."""
        parts = [part for matrix in matrices for part in parts_of(matrix)]
        return any(part.kind in FLOAT_KINDS or part in self.wide for part in parts)

    def by_head(self, x: Value, matrices: Sequence[Matrix], tail: int = 0) -> Value:
        return by_head(self.graph, x, [cpu_matrix(matrix) for matrix in matrices], tail)

    def rope(self, x: Value, num_heads: int, head_dim: int, rows: StepRows, rope_table: RopeTable) -> Value:
        """Put a record of `rope_store` without keys and values: it takes the heads of x for queries, and turns them."""
        fields = {"x": self.graph.read(x), "ld_x": x.ld, "heads": num_heads, "kv_heads": 0, "head_dim": head_dim}
        fields |= {"cos": rope_table.cos, "sin": rope_table.sin, "pairs": rope_table.cos.shape[1]}
        fields["first"] = rope_table.first
        fields |= {"positions": rows.rope_rows, "slots": rows.slots[0], "eps": 0.0, "offset": 0.0, "kv_type": 0}
        pointers = ("q_norm", "k_norm", "copy_begin", "copy_slots", "k", "v", "k_scale", "v_scale", "k_mean")
        self.graph.put("rope_store", x.dim, None, fields | {"value_dim": 0} | dict.fromkeys(pointers))
        return Value(self.graph, x.buffer, x.width, x.item_bytes, column=x.column)

    def rope_store(
        self, qkv: Value, heads: Heads, rows: StepRows, cache: LayerCache, form: HeadForm = HeadForm()
    ) -> Value:
        rope_table, q_norm, k_norm = form
        norm = q_norm or k_norm
        fields: dict[str, Any] = {
            "x": self.graph.read(qkv),
            "ld_x": qkv.ld,
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "value_dim": heads.value_size,
            "q_norm": None if q_norm is None else q_norm.weight,
            "k_norm": None if k_norm is None else k_norm.weight,
            "eps": 0.0 if norm is None else norm.eps,
            "offset": 0.0 if norm is None else norm.offset,
            "cos": None if rope_table is None else rope_table.cos,
            "sin": None if rope_table is None else rope_table.sin,
            "pairs": 0 if rope_table is None else rope_table.cos.shape[1],
            "first": 0 if rope_table is None else rope_table.first,
            "positions": rows.rope_rows,
            "slots": rows.slots[cache.kind],
            "copy_begin": rows.copy_begin,
            "copy_slots": rows.copy_slots,
            "k_mean": cache.key_mean,
        }
        node = self.graph.put("rope_store", qkv.dim, None, fields | cache.fields())
        width = heads.num_heads * heads.head_dim
        return Value(self.graph, qkv.buffer, width, qkv.item_bytes, node, column=qkv.column)

    def attention(self, query: Value, heads: Heads, rows: StepRows, cache: LayerCache, scoring: Scoring) -> Value:
        out = self.graph.value(heads.num_heads * heads.value_size, query.dim)
        fields = self._in_out(query, out) | {
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "value_dim": heads.value_size,
            "window": scoring.reach,
            "ld_bias": 0 if scoring.bias is None else scoring.bias.shape[1],
            "block_size": rows.block_size,
            "row_begin": rows.row_begin,
            "start": rows.start,
            "seen": rows.seen,
            "table_begin": rows.table_begin,
            "blocks": rows.blocks[cache.kind],
        }
        del fields["width"]
        fields |= {name: getattr(scoring, name) for name in ("scale", "ahead", "softcap", "sinks", "bias")}
        self.graph.put("attention", query.dim, out, fields | cache.fields())
        return out

    def conv(self, x: Value, weight: F32, bias: F32 | None, kind: Activation, rows: StepRows, state: F32) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"size": len(weight), "weight": weight, "bias": bias, "kind": KINDS[kind]}
        self.graph.put("conv", x.dim, out, self._in_out(x, out) | fields | state_fields(rows, state))
        return out

    def delta(self, inputs: DeltaInputs, heads: StateHeads, rows: StepRows, state: F32, scale: float) -> Value:
        fields = {"scale": scale, "decay_width": inputs.decay.width // heads.num_heads}
        return self._recurrent("delta", inputs._asdict(), heads, rows, state, fields)

    def scan(self, inputs: ScanInputs, heads: StateHeads, rows: StepRows, state: F32) -> Value:
        parts = inputs._asdict()
        fields = {name: parts.pop(name) for name in ("a", "d")}
        return self._recurrent("scan", parts, heads, rows, state, fields)

    def _recurrent(
        self, op: str, parts: dict[str, Value], heads: StateHeads, rows: StepRows, state: F32, fields: dict[str, Any]
    ) -> Value:
        dim = next(iter(parts.values())).dim
        out = self.graph.value(heads.num_heads * heads.value_dim, dim)
        for name, part in parts.items():
            fields |= {name: self.graph.read(part), f"ld_{name}": part.ld}
        sizes = {"heads": heads.num_heads, "key_heads": heads.num_key_heads, "tiled": int(heads.tiled)}
        sizes |= {"key_dim": heads.key_dim, "value_dim": heads.value_dim}
        fields |= sizes | state_fields(rows, state) | {"out": out.buffer, "ld_out": out.ld}
        self.graph.put(op, dim, out, fields, row_ops=6 * heads.key_dim * out.width)
        return out

    def softplus(
        self, x: Value, bias: F32, factor: F32 | None = None, low: float = 0.0, high: float = math.inf
    ) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"bias": bias, "factor": factor, "low": low, "high": high}
        self.graph.put("softplus", x.dim, out, self._in_out(x, out) | fields)
        return out

    def experts(self, x: Value, layer: ExpertLayer, seen: Value | None = None) -> Value:
        first, second = ([cpu_matrix(matrix) for matrix in part] for part in (layer.gate_up, layer.down))
        act = self.gated if layer.has_gate else self.activation
        logits, mixture = self.linear(seen or x, layer.router), Experts(self, layer.routing, layer.router.num_out)
        return mixture.mix(x, logits, first, second, lambda y: act(y, layer.kind))

    def _product(
        self,
        x: Value,
        codes: Quantised | None,
        matrix: CpuMatrix,
        out: Value | None = None,
        column: int = 0,
        *,
        adds: bool = False,
    ) -> Value:
        """Put the product into `out`, a new value by default, from `column` on. `adds`: add it to the numbers there."""
        name, fields = product(matrix, x, codes)
        if out is None:
            out = self.graph.value(matrix.num_out, x.dim)
        if codes is None:
            self.graph.read(x)
        for buffer in (out.buffer, *(() if codes is None else codes.buffers())):
            self.graph.touch(buffer)
        at = ("column", out.buffer, column) if column else out.buffer
        if adds:
            fields |= {"residual": at, "ld_res": out.ld}
        self.graph.put(
            name,
            x.dim,
            out,
            fields | {"out": at, "ld_out": out.ld},
            note=matrix.name,
            read_bytes=matrix.data.nbytes,
            row_ops=2 * matrix.num_in * matrix.num_out,
        )
        return out

    def _in_out(self, x: Value, out: Value) -> dict[str, Any]:
        return {"x": self.graph.read(x), "ld_x": x.ld, "width": x.width, "out": out.buffer, "ld_out": out.ld}


def state_fields(rows: StepRows, state: F32) -> dict[str, Any]:
    return {"state": state, "row_begin": rows.row_begin, "state_in": rows.state_in, "state_out": rows.state_out}


def cpu_matrix(matrix: Matrix) -> CpuMatrix | CpuStack:
    if not isinstance(matrix, CpuMatrix | CpuStack):
        raise TypeError(f"a matrix of another backend: {type(matrix).__name__}")
    return matrix


def rounded(value: float, dtype: str) -> float:
    """Return `value` as `dtype` holds it: a factor that training applied in that dtype."""
    if dtype == "float16":
        return float(np.float16(value))
    single = np.float32(value)
    if dtype == "bfloat16":
        bits = int(single.view(np.uint32))
        single = np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return float(single)
