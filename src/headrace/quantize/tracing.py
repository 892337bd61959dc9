"""A model whose linear layers are loaded one decoder layer at a time, and whose inputs are recorded.

The model files run unchanged on `TracingOps`: matrices are names until the weights of their decoder layer are loaded,
the inputs of a linear layer go into its statistics, and the norm or layer that a tensor came from is recorded, so that
scales can be folded. Float32 throughout. Knows no methods. Called by `quantize.driver`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.base import Activation, Array, Backend, Heads, Matrix, Scoring
from headrace.backends.torch_ref import TorchRef
from headrace.backends.torch_ref.batch import ForwardBatch
from headrace.backends.torch_ref.cache import LayerCache
from headrace.backends.torch_ref.ops import RefOps
from headrace.backends.torch_ref.tensors import tensor
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.tensors import Checkpoint
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError
from headrace.quant.base import MatrixSource
from headrace.quantize.base import Fold, Statistics


@dataclass(slots=True, eq=False)
class LazyMatrix:
    """A linear layer, or several stacked ones: their names in the checkpoint and their numbers of outputs. transposed:
    stored [in, out]. orders: for each layer None, or of each output its place in the checkpoint."""

    num_in: int
    num_out: int
    names: tuple[str, ...] = ()
    num_outs: tuple[int, ...] = ()
    bias: bool = False
    plain: bool = False
    transposed: bool = False
    orders: tuple[Any, ...] = ()


@dataclass(slots=True)
class Origin:
    """Where a tensor came from: a norm, a matrix, a matrix whose queries were taken, or the outputs of one layer."""

    kind: Literal["norm", "matrix", "query", "rows"]
    name: str = ""
    matrix: LazyMatrix | None = None
    index: Tensor | None = None


def _whole_texts(query: Tensor, heads: Heads, rows: ForwardBatch, cache: LayerCache, scale: float) -> Tensor:
    """Attention of whole texts, each to its own earlier rows: torch's own, since the texts of a calibration are always
    cut alike, and their rows need not have the bits that each would have alone."""
    block_size, outs = cache.keys.shape[1], []
    queries = torch.split(query.view(len(query), heads.num_heads, heads.head_dim), rows.lens)
    for length, table, q in zip(rows.lens, rows.block_tables[cache.kind], queries, strict=True):
        blocks = table[: -(-length // block_size)]
        keys, values = (part[blocks].flatten(0, 1)[:length].float() for part in (cache.keys, cache.values))
        key, value, q = (part.transpose(0, 1)[None] for part in (keys, values, q.float()))
        out = F.scaled_dot_product_attention(q, key, value, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outs)


class TracingOps(RefOps):
    """The reference's operators over weights that are loaded layer by layer.

    weights, biases: float32, of the current decoder layer, by name. statistics: by first name of a matrix, while
    `recording`.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self.weights: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor] = {}
        self.recording = False
        self.statistics: dict[str, Statistics] = {}
        self.norm_names: dict[int, str] = {}
        self.offsets: dict[str, float] = {}
        self.fed: dict[tuple[str, str], list[tuple[LazyMatrix, Tensor | None]]] = {}
        self._origins: dict[int, tuple[Tensor, Origin]] = {}

    def matrix(self, source: MatrixSource, bias: Tensor | None = None) -> Any:
        return LazyMatrix(source.num_in, source.num_out, bias=bias is not None)

    def forget(self) -> None:
        """Release the tensors of a run."""
        self._origins.clear()

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        if not isinstance(matrix, LazyMatrix):
            raise TypeError(f"a matrix of another backend: {type(matrix).__name__}")
        if self.recording:
            self._record(x, matrix)
        parts = [F.linear(x, self.weights[name], self.biases.get(name)) for name in matrix.names]
        for i, order in enumerate(matrix.orders):
            parts[i] = parts[i] if order is None else parts[i][:, torch.from_numpy(order)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return self._with_origin(out, Origin("matrix", matrix=matrix))

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, heads: int = 1) -> Tensor:
        out = super().rms_norm(x, weight, eps, offset, heads)
        name = self.norm_names.get(id(weight), "")
        self.offsets[name] = offset
        return self._with_origin(out, Origin("norm", name)) if name else out

    def gated(self, x: Tensor, kind: Activation) -> Tensor:
        out = super().gated(x, kind)
        matrix = self._matrix_of(x)
        if matrix is None or len(matrix.names) != 2:
            return out
        return self._with_origin(out, Origin("rows", matrix.names[1], index=torch.arange(matrix.num_outs[1])))

    def rope_store(self, qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().rope_store(qkv, *args, **kwargs)
        return self._with_origin(out, Origin("query", matrix=self._matrix_of(qkv)))

    def attention(self, query: Tensor, heads: Heads, rows: ForwardBatch, cache: LayerCache, scoring: Scoring) -> Tensor:
        is_plain = not (scoring.window or scoring.softcap or scoring.ahead or scoring.sinks is not None)
        if is_plain and not any(rows.starts):
            out = _whole_texts(query, heads, rows, cache, scoring.scale)
        else:
            out = super().attention(query, heads, rows, cache, scoring)
        origin = self._origins.get(id(query))
        matrix = origin[1].matrix if origin is not None else None
        if matrix is None or len(matrix.names) != 3:
            return out
        # Query head h reads the values of head h // (heads / kv_heads).
        head = torch.arange(heads.num_heads) // (heads.num_heads // heads.num_kv_heads)
        index = (head.unsqueeze(1) * heads.head_dim + torch.arange(heads.head_dim)).flatten()
        return self._with_origin(out, Origin("rows", matrix.names[2], index=index))

    def embedding(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return super().embedding(ids, table, scale).float()

    def folds(self) -> list[Fold]:
        """The folds between the operators that ran while recording: every layer that is fed will be quantised."""
        folds = []
        for (_, name), fed in self.fed.items():
            if any(matrix.plain for matrix, _ in fed):
                continue
            index = fed[0][1]
            after = [part for matrix, _ in fed for part in matrix.names]
            folds.append(Fold(name, after, torch.arange(fed[0][0].num_in) if index is None else index))
        return folds

    def _record(self, x: Tensor, matrix: LazyMatrix) -> None:
        statistics = self.statistics.setdefault(matrix.names[0], Statistics(0 if matrix.plain else matrix.num_in))
        if not matrix.plain:
            statistics.add(x)
        origin = self._origins.get(id(x))
        if origin is not None and origin[1].kind in ("norm", "rows"):
            fed = self.fed.setdefault((origin[1].kind, origin[1].name), [])
            if all(other is not matrix for other, _ in fed):
                fed.append((matrix, origin[1].index))

    def _with_origin(self, out: Tensor, origin: Origin) -> Tensor:
        if self.recording:
            self._origins[id(out)] = (out, origin)  # the reference keeps its id from being used again
        return out

    def _matrix_of(self, x: Tensor) -> LazyMatrix | None:
        origin = self._origins.get(id(x))
        return origin[1].matrix if origin is not None and origin[1].kind == "matrix" else None


class TracingBackend(TorchRef):
    """Memory for a `TracingOps`: the embedding table stays mapped."""

    def __init__(self) -> None:
        super().__init__("cpu", "float32")
        self.tracing = TracingOps()
        self.ops = self.tracing

    def table(self, values: Any) -> Tensor:
        return tensor(values)


class LazyWeights(SafetensorsWeights):
    """Weights whose matrices are `LazyMatrix`, but for the head. matrices: of the decoder layers. norms: the small
    tensors by name."""

    def __init__(self, checkpoint: Checkpoint, backend: TracingBackend) -> None:
        super().__init__(checkpoint, cast(Backend, backend))
        self._ops = backend.tracing
        self.matrices: list[LazyMatrix] = []
        self.norms: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        norm: Tensor = super().tensor(name, shape)
        self.norms[name] = norm
        self._ops.norm_names[id(norm)] = name.removesuffix(".weight")
        return norm

    def matrix(self, linear: Linear) -> Matrix:
        if linear.by_shape:
            raise CheckpointError(f"{linear.names[0]}.weight may be stored [in, out]: such experts are not quantised")
        matrix = super().matrix(linear)
        if not isinstance(matrix, LazyMatrix):
            raise TypeError(f"a matrix of another backend: {type(matrix).__name__}")
        matrix.names, matrix.num_outs = tuple(linear.names), tuple(linear.num_outs)
        matrix.plain, matrix.transposed, matrix.orders = linear.plain, linear.transposed, tuple(linear.orders)
        self.matrices.append(matrix)
        return matrix
