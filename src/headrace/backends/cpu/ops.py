"""`Ops` that record instead of computing: one call of a model's forward pass becomes a `Graph`.

Each method puts the nodes of one operator; their meaning, to the bit, is in csrc/include/kernels.h. Quantisation of
activations and additions to the residual become part of the neighbouring node where its operator allows it. Called by
models; must not know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Activation, HeadNorm, Heads, Matrix, RopeTable
from headrace.backends.cpu.codes import Quantised, new_codes, quantised
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack, make_matrix
from headrace.backends.cpu.memory import Pool
from headrace.backends.graph import FREE, LOGITS, Graph, Value
from headrace.backends.step import StepRows

if TYPE_CHECKING:
    from headrace.backends.cpu.cache import LayerCache
    from headrace.backends.cpu.matrix import PackedRecord, Table
    from headrace.quant.base import MatrixSource

KINDS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
KIND_CODES = {"i4": 0, "i6": 1, "i8": 2, "k": 3, "f8": 4, "i3": 5, "i2": 6}
"""HR_KIND of csrc/include/kernels.h."""
FLOAT_KINDS = ("f", "f8", "i3", "i2")
"""Kinds that are multiplied with floats alone."""
NO_Q: dict[str, Any] = {"q": None, "ld_q": 0, "scales": None, "sums": None, "ld_s": 0, "group": 0}

F32 = NDArray[np.float32]

ITEM_BYTES = 4
"""Values between operators are float32."""


class Pair(NamedTuple):
    """A product computed both ways: with int8 activations (`narrow`) and with floats; `last` is its last node."""

    matrix: CpuMatrix | CpuStack
    narrow: Value
    wide: Value
    last: int


class CpuOps:
    """Writes to `graph`; `begin` starts a new one."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.graph = Graph(ITEM_BYTES)
        self.weight_bytes = 0
        self.matrices: list[CpuMatrix | CpuStack] = []
        self.pool = Pool()
        self.wide: set[CpuMatrix] = set()
        """Matrices of integer codes whose activations stay floats (`activations.choose_activations`)."""
        self.pairs: list[Pair] | None = None
        """A list while products are recorded both ways."""

    def begin(self) -> None:
        self.graph = Graph(ITEM_BYTES)

    def matrix(self, source: MatrixSource, bias: F32 | None = None) -> CpuMatrix:
        matrix = make_matrix(source, bias, self.pool)
        self.matrices.append(matrix)
        self.weight_bytes += matrix.num_bytes
        return matrix

    def stacked(self, name: str, matrices: Sequence[Matrix]) -> CpuStack:
        parts = tuple(matrix for matrix in matrices if isinstance(matrix, CpuMatrix))
        self.matrices = [matrix for matrix in self.matrices if matrix not in parts]
        stack = CpuStack(name, parts)
        self.matrices.append(stack)
        return stack

    def packed(self, record: PackedRecord) -> CpuMatrix:
        """Return a matrix that was packed before and is mapped now."""
        matrix = CpuMatrix(record.name, record.scheme, record.data, record.num_in, record.num_out, record.bias)
        self.matrices.append(matrix)
        self.weight_bytes += matrix.data.nbytes
        return matrix

    def embedding(self, ids: NDArray[np.int32], table: Table, scale: float = 1.0) -> Value:
        out = self.graph.value(table.width, 0)
        fields = {"ids": ids, "table": table.data, "type": table.type_code, "width": table.width}
        fields |= {"scale": rounded(scale, self.dtype), "out": out.buffer, "ld_out": out.ld}
        self.graph.put("embedding", out.dim, out, fields)
        return out

    def select(self, x: Value, rows: NDArray[np.int32]) -> Value:
        out = self.graph.value(x.width, LOGITS)
        self.graph.put("select_rows", LOGITS, out, {"rows": rows} | self._in_out(x, out))
        return out

    def rms_norm(self, x: Value, weight: F32, eps: float, offset: float = 0.0) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"weight": weight, "eps": eps, "offset": offset, "heads": 1}
        self.graph.put("rms_norm", x.dim, out, self._in_out(x, out) | fields | NO_Q)
        return out

    def layer_norm(self, x: Value, weight: F32, bias: F32, eps: float) -> Value:
        out = self.graph.value(x.width, x.dim)
        fields = {"weight": weight, "bias": bias, "eps": eps}
        self.graph.put("layer_norm", x.dim, out, self._in_out(x, out) | fields | NO_Q)
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        # In place: the logits of a large vocabulary need not lie there twice.
        buffer = self.graph.read(x)
        fields = {"x": buffer, "ld_x": x.ld, "width": x.width, "cap": cap, "out": buffer, "ld_out": x.ld}
        node = self.graph.put("softcap", x.dim, None, fields)
        return Value(self.graph, x.buffer, x.width, x.item_bytes, node, num_uses=1)

    def activation(self, x: Value, kind: Activation) -> Value:
        out = self.graph.value(x.width, x.dim)
        self.graph.put("activation", x.dim, out, self._in_out(x, out) | {"kind": KINDS[kind]} | NO_Q)
        return out

    def gated(self, x: Value, kind: Activation) -> Value:
        out = self.graph.value(x.width // 2, x.dim)
        fields = self._in_out(x, out) | {"width": x.width // 2, "kind": KINDS[kind]}
        self.graph.put("gated", x.dim, out, fields | NO_Q)
        return out

    def linear(self, x: Value, matrix: Matrix) -> Value:
        weights = cpu_matrix(matrix)
        if weights.outliers is None:
            return self._either(x, weights)
        # Outliers are multiplied in float; in what is quantised they are exactly zero.
        outliers = self._linear(x, None, weights.outliers.pick)
        rest = x + self._linear(outliers, None, weights.outliers.back)
        product = self._either(rest, weights)
        return product + self._linear(outliers, None, weights.outliers.kept)

    def _either(self, x: Value, matrix: CpuMatrix | CpuStack) -> Value:
        """The product with int8 activations, or with floats where the matrix has plain numbers or was chosen for it."""
        if self.takes_floats(matrix):
            return self._linear(x, None, matrix)
        if self.pairs is None:
            return self._linear(x, quantised(x, matrix.act_group), matrix)
        narrow = self._linear(x, quantised(x, matrix.act_group), matrix)
        wide = self._linear(x, None, matrix)
        wide.node = None  # a residual must not become part of it
        narrow.buffer.last = wide.buffer.last = len(self.graph.nodes) - 1
        self.pairs.append(Pair(matrix, narrow, wide, len(self.graph.nodes) - 1))
        return wide

    def takes_floats(self, *matrices: CpuMatrix | CpuStack) -> bool:
        """Whether the products of any of the matrices take floats."""
        parts = [part for matrix in matrices for part in getattr(matrix, "parts", (matrix,))]
        return any(part.kind in FLOAT_KINDS or part in self.wide for part in parts)

    def rope_store(
        self,
        qkv: Value,
        heads: Heads,
        rows: StepRows,
        cache: LayerCache,
        rope_table: RopeTable | None = None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> Value:
        norm = q_norm or k_norm
        fields: dict[str, Any] = {
            "x": self.graph.read(qkv),
            "ld_x": qkv.ld,
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "q_norm": None if q_norm is None else q_norm.weight,
            "k_norm": None if k_norm is None else k_norm.weight,
            "eps": 0.0 if norm is None else norm.eps,
            "offset": 0.0 if norm is None else norm.offset,
            "cos": None if rope_table is None else rope_table.cos,
            "sin": None if rope_table is None else rope_table.sin,
            "pairs": 0 if rope_table is None else rope_table.cos.shape[1],
            "positions": rows.positions,
            "slots": rows.slots,
            "copy_begin": rows.copy_begin,
            "copy_slots": rows.copy_slots,
            "k_mean": cache.key_mean,
        }
        node = self.graph.put("rope_store", qkv.dim, None, fields | cache.fields())
        return Value(self.graph, qkv.buffer, heads.num_heads * heads.head_dim, qkv.item_bytes, node)

    def attention(
        self,
        query: Value,
        heads: Heads,
        rows: StepRows,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
    ) -> Value:
        out = self.graph.value(heads.num_heads * heads.head_dim, query.dim)
        fields = self._in_out(query, out) | {
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "scale": scale,
            "window": window or 0,
            "softcap": softcap,
            "block_size": rows.block_size,
            "row_begin": rows.row_begin,
            "start": rows.start,
            "table_begin": rows.table_begin,
            "blocks": rows.blocks,
        }
        del fields["width"]
        self.graph.put("attention", query.dim, out, fields | cache.fields())
        return out

    def experts(
        self,
        x: Value,
        router: Matrix,
        top_k: int,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        kind: Activation,
    ) -> Value:
        graph, num_experts = self.graph, router.num_out
        first = cpu_matrix(gate_up[0])
        split = any(cpu_matrix(matrix).outliers is not None for matrix in gate_up)
        wide = self.takes_floats(*map(cpu_matrix, gate_up))
        source = quantised(x, first.act_group) if not (wide or split or self.pairs is not None) else None
        logits = self.linear(x, router)
        ids, weights = graph.buffer(4 * top_k, x.dim), graph.buffer(4 * top_k, x.dim)
        fields: dict[str, Any] = {"x": graph.read(logits), "ld_x": logits.ld, "num_experts": num_experts}
        graph.put("route", x.dim, None, fields | {"top_k": top_k, "ids": ids, "weights": weights})
        # One list of rows for each expert: [experts][rows] of ints, kept as a row of `num_experts` for each row.
        lists, list_weights = graph.buffer(4 * num_experts, x.dim), graph.buffer(4 * num_experts, x.dim)
        fields = {"ids": graph.touch(ids), "weights": graph.touch(weights), "top_k": top_k, "num_experts": num_experts}
        fields |= {"lists": lists, "list_weights": list_weights, "ld_list": ("capacity", x.dim), "first_dim": FREE}
        graph.put("moe_group", x.dim, None, fields)
        out = self.graph.value(x.width, x.dim)
        graph.put("zero", x.dim, out, {"out": out.buffer, "ld_out": out.ld, "width": x.width})
        for expert_id in range(num_experts):
            rows = ("row_of", lists, expert_id)
            matrices = cpu_matrix(gate_up[expert_id]), cpu_matrix(down[expert_id])
            self._expert(x, source, rows, FREE + expert_id, *matrices, kind, out, list_weights)
            graph.touch(lists)
            graph.touch(list_weights)
        return out

    def _expert(
        self,
        x: Value,
        source: Quantised | None,
        rows: tuple[str, Any, int],
        dim: int,
        gate_up: CpuMatrix | CpuStack,
        down: CpuMatrix | CpuStack,
        kind: Activation,
        out: Value,
        list_weights: Any,
    ) -> None:
        graph = self.graph
        nothing: dict[str, Any] = NO_Q | {"to_q": None, "to_scales": None, "to_sums": None}
        del nothing["group"]
        gathered = self.graph.value(x.width, dim)
        if source is None:
            fields = nothing | {"list": rows, "x": graph.read(x), "ld_x": x.ld, "width": x.width}
            graph.put("moe_gather", dim, gathered, fields | {"out": gathered.buffer, "ld_out": gathered.ld})
            gathered.node = None  # its q is codes that it reads
            codes = None
        else:
            codes = new_codes(graph, dim, source.ld_q, source.ld_s, source.group)
            fields = nothing | source.fields() | {"list": rows, "x": None, "ld_x": 0, "width": x.width}
            fields |= {"out": None, "ld_out": 0, "to_q": codes.q, "to_scales": codes.scales, "to_sums": codes.sums}
            del fields["group"]
            for part in source.buffers():
                graph.touch(part)
            graph.put("moe_gather", dim, None, fields)
            for part in codes.buffers():
                graph.touch(part)
            gathered.codes[source.group] = codes
            graph.drop(gathered.buffer)
        inner = self.linear(gathered, gate_up) if codes is None else self._linear(gathered, codes, gate_up)
        y = self.linear(self.gated(inner, kind), down)
        fields = {
            "list": rows,
            "list_weights": ("row_of", list_weights, rows[2]),
            "x": graph.read(y),
            "ld_x": y.ld,
        }
        fields |= {"width": x.width, "out": graph.touch(out.buffer), "ld_out": out.ld}
        graph.put("moe_scatter", dim, None, fields)

    def _linear(self, x: Value, codes: Quantised | None, matrix: CpuMatrix | CpuStack) -> Value:
        out = self.graph.value(matrix.num_out, x.dim)
        if isinstance(matrix, CpuMatrix):
            self._product(x, codes, matrix, out, out.buffer)
            return out
        column = 0
        for part in matrix.parts:
            for buffer in (out.buffer, *(codes.buffers() if codes is not None else ())):
                self.graph.touch(buffer)
            self._product(x, codes, part, out, ("column", out.buffer, column))
            column += part.num_out
        out.node = None  # no node makes all of it, so none can add a residual
        return out

    def _product(self, x: Value, codes: Quantised | None, matrix: CpuMatrix, out: Value, at: Any) -> None:
        fields: dict[str, Any] = {
            "weights": matrix.data,
            "num_in": matrix.num_in,
            "num_out": matrix.num_out,
            "bias": matrix.bias,
            "residual": None,
            "ld_res": 0,
            "out": at,
            "ld_out": out.ld,
        }
        floats = codes is None
        if codes is None:
            fields |= {"x": self.graph.read(x), "ld_x": x.ld}
            if matrix.kind == "f":
                fields |= {"type": matrix.flag}
            else:
                fields |= {"kind": KIND_CODES[matrix.kind], "group": matrix.act_group, "form": matrix.flag}
        else:
            fields |= codes.fields() | {"weight_group" if matrix.kind == "i8" else "form": matrix.flag}
        self.graph.put(
            f"linear_{matrix.kind}" if matrix.kind == "f" or not floats else "linear_w",
            x.dim,
            out,
            fields,
            note=matrix.name,
            read_bytes=matrix.data.nbytes,
            row_ops=2 * matrix.num_in * matrix.num_out,
        )

    def _in_out(self, x: Value, out: Value) -> dict[str, Any]:
        return {
            "x": self.graph.read(x),
            "ld_x": x.ld,
            "width": x.width,
            "out": out.buffer,
            "ld_out": out.ld,
        }


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
