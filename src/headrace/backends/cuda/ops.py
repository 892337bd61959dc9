"""`Ops` that record instead of computing: one call of a model's forward pass becomes a `Graph`.

Each method puts the node of one operator, under the name of its binder in `tape`. Additions to the residual and gated
activations become part of the linear layer before them. Called by models; must not know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
from headrace.backends.cuda.gathers import Exchange
from headrace.backends.cuda.kernels.experts import Mixture
from headrace.backends.cuda.matrix import CudaMatrix, make_matrix
from headrace.backends.cuda.recurrent import CudaRecurrentOps
from headrace.backends.cuda.stacks import Stacks, stack_of
from headrace.backends.graph import LOGITS, ROWS, Graph, Value
from headrace.backends.shares import Layout
from headrace.backends.step import StepRows
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.cuda.cache import LayerCache
    from headrace.quant.base import MatrixSource


class CudaOps(CudaRecurrentOps):
    """Writes to `graph`; `begin` starts a new one."""

    adapters = None

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.weight_bytes = 0
        self.matrices: list[CudaMatrix] = []
        self._stacks = Stacks(dtype)
        self.begin()

    def begin(self) -> None:
        self.graph = Graph(self.dtype.itemsize)

    def whole(self, x: Value) -> Value:
        """Return all columns of x, of which an operator of one rank of several may give some (`ranks.CudaRankOps`)."""
        return x

    def cache_shapes(self, model: Any) -> Sequence[LayerShape]:
        """Return the cached arrays of each layer."""
        shapes: Sequence[LayerShape] = model.cache_shapes
        return shapes

    def every_cache(self, model: Any) -> Sequence[Sequence[LayerShape]]:
        """Return the cached arrays of all ranks, each on its own device."""
        every: Sequence[Sequence[LayerShape]] | None = getattr(model, "shapes_by_host", None)
        return every or [self.cache_shapes(model)]

    def matrix(self, source: MatrixSource, bias: Tensor | None = None, num_whole: int = 0) -> CudaMatrix:
        """See `make_matrix`."""
        matrix = make_matrix(source, bias, self.device, self.dtype, num_whole)
        self.matrices.append(matrix)
        self.weight_bytes += matrix.num_bytes
        self._stacks.add(matrix)
        return matrix

    def embedding(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Value:
        # The factor is rounded to the model's dtype, as in training.
        factor = float(torch.tensor(scale, dtype=self.dtype))
        return self._put("embedding", table.shape[1], ROWS, ids=ids, table=table, scale=factor)

    def select(self, x: Value, rows: Tensor) -> Value:
        return self._put("select", x.width, LOGITS, x=x, rows=rows)

    def rms_norm(self, x: Value, weight: Tensor | None, eps: float, offset: float = 0.0, heads: int = 1) -> Value:
        fields: dict[str, Any] = {"weight": weight, "eps": eps, "offset": offset, "heads": heads}
        fields |= {"bias": None, "centred": False}
        return self._put("norm", x.width, x.dim, x=x, **fields)

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Value:
        fields: dict[str, Any] = {"weight": weight, "eps": eps, "offset": offset, "heads": 1}
        fields |= {"bias": bias, "centred": True}
        return self._put("norm", x.width, x.dim, x=x, **fields)

    def norm_columns(self, x: Value, first: int, num: int, norm: HeadNorm) -> Value:
        # In place: the other columns stay where the next operator reads them.
        part = self.columns(x, first, num * len(norm.weight))
        self._read(part)
        fields = norm._asdict() | {"bias": None, "centred": False, "heads": num}
        self.graph.put("norm", x.dim, None, fields | {"x": part, "out": part})
        return Value(self.graph, x.buffer, x.width, x.item_bytes, column=x.column)

    def scale(self, x: Value, factor: float) -> Value:
        return self._put("scale", x.width, x.dim, x=x, factor=factor)

    def columns(self, x: Value, first: int, width: int) -> Value:
        return self.graph.columns(x, first, width)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._put("softcap", x.width, x.dim, item_bytes=4, x=x, cap=cap)

    def activation(self, x: Value, kind: Activation) -> Value:
        return self._put("activation", x.width, x.dim, x=x, kind=kind)

    def xielu(self, x: Value, positive: float, negative: float, beta: float) -> Value:
        return self._put("xielu", x.width, x.dim, x=x, positive=positive, negative=negative, beta=beta)

    def gated(self, x: Value, kind: Activation) -> Value:
        node = x.node
        if node is None or node is not self.graph.nodes[-1] or x.num_uses or node.fields.get("gate", "") is not None:
            return self._put("gated", x.width // 2, x.dim, x=x, kind=kind)
        # The linear layer's kernel computes both halves and writes their product alone.
        self.graph.drop(x.buffer)
        out = self.graph.value(x.width // 2, x.dim)
        out.buffer.first = out.buffer.last = node.index
        out.node = node
        del node.fields["residual"]
        node.fields |= {"gate": kind, "out": out}
        return out

    def linear(self, x: Value, matrix: Matrix) -> Value:
        weights = cuda_matrix(matrix)
        # Logits are float32: rounded to 16 bits, many of them would be equal.
        item_bytes = 4 if x.dim == LOGITS else 0
        out = self._put("linear", weights.num_out, x.dim, item_bytes, x=x, matrix=weights, residual=None, gate=None)
        if out.node is not None:
            out.node.note, out.node.read_bytes = weights.name, weights.num_bytes
            out.node.row_ops = 2 * weights.num_in * weights.num_out
        return out

    def by_head(self, x: Value, matrices: Sequence[Matrix], tail: int = 0) -> Value:
        parts = [cuda_matrix(matrix) for matrix in matrices]
        heads, num_out, num_in = len(parts), parts[0].num_out, parts[0].num_in
        for part in parts:
            part.data = part.plain()  # the kernel takes no codes
        stack = stack_of(parts, self.dtype).data
        if not isinstance(stack, Tensor):
            raise TypeError("plain weights became codes")
        weights = stack.view(heads, num_out, num_in)
        out = self._put("by_head", heads * (num_out + tail), x.dim, x=x, weights=weights, tail=tail)
        if out.node is not None:
            out.node.note, out.node.read_bytes = parts[0].name, weights.nbytes
            out.node.row_ops = 2 * heads * num_in * num_out
        return out

    def rope(self, x: Value, num_heads: int, head_dim: int, rows: StepRows, rope_table: RopeTable) -> Value:
        fields = {"num_heads": num_heads, "head_dim": head_dim, "rows": rows, "rope_table": rope_table}
        self.graph.put("rope", x.dim, None, fields | {"x": self._read(x)})
        return Value(self.graph, x.buffer, x.width, x.item_bytes, column=x.column)

    def rope_store(
        self, qkv: Value, heads: Heads, rows: StepRows, cache: LayerCache, form: HeadForm = HeadForm()
    ) -> Value:
        fields = {"x": self._read(qkv), "heads": heads, "rows": rows, "cache": cache, "form": form}
        node = self.graph.put("rope_store", qkv.dim, None, fields)
        return Value(self.graph, qkv.buffer, heads.num_heads * heads.head_dim, qkv.item_bytes, node, column=qkv.column)

    def attention(self, query: Value, heads: Heads, rows: StepRows, cache: LayerCache, scoring: Scoring) -> Value:
        if scoring.bias is not None:
            raise CheckpointError("backend cuda has no kernels for scores with a bias by distance")
        width = heads.num_heads * heads.value_size
        return self._put(
            "attention", width, query.dim, x=query, heads=heads, rows=rows, cache=cache, scoring=scoring
        )  # fmt: skip

    def experts(self, x: Value, layer: ExpertLayer, seen: Value | None = None) -> Value:
        logits = self.linear(x if seen is None else seen, layer.router)
        self._stacks.close()
        gate_up, down = (
            stack_of([cuda_matrix(matrix) for matrix in part], self.dtype) for part in (layer.gate_up, layer.down)
        )
        mixture = Mixture(layer.routing, gate_up, down, layer.kind)
        return self._put("experts", x.width, x.dim, x=x, logits=logits, mixture=mixture)

    def multiply(self, x: Value, gate: Value, kind: Activation) -> Value:
        return self._put("multiply", x.width, x.dim, x=x, gate=gate, kind=kind)

    def gather(self, x: Value, layout: Layout, exchange: Exchange) -> Value:
        """Return the whole rows; each rank has the columns that `layout` gives it."""
        return self._put("gather", layout.width, x.dim, x.item_bytes, x=x, layout=layout, exchange=exchange)

    def finite(self, x: Value, flags: Tensor) -> None:
        """Write for each row of x whether all its numbers are finite."""
        self.graph.put("finite", x.dim, None, {"x": self._read(x), "flags": flags})

    def best(self, logits: Value, ids: Tensor, finite: Tensor, values: Tensor) -> None:
        """Write the likeliest token of each row of logits, and whether the row is finite."""
        fields = {"x": self._read(logits), "ids": ids, "finite": finite, "values": values}
        self.graph.put("best", logits.dim, None, fields)

    def _put(self, op: str, width: int, dim: int, item_bytes: int = 0, **fields: Any) -> Value:
        """Put a node that makes a new value. Values among the fields are read by it."""
        out = self.graph.value(width, dim, item_bytes)
        fields = {name: self._read(value) if isinstance(value, Value) else value for name, value in fields.items()}
        self.graph.put(op, dim, out, fields | {"out": out})
        return out

    def _read(self, value: Value) -> Value:
        self.graph.read(value)
        return value


def cuda_matrix(matrix: Matrix) -> CudaMatrix:
    if not isinstance(matrix, CudaMatrix):
        raise TypeError(f"a matrix of another backend: {type(matrix).__name__}")
    return matrix
