"""`CudaRankOps`: the operators of one rank of several on GPUs.

A rank has some columns of each product and some heads of each attention (`backends.split`). Experts are whole on every
rank as yet. Knows values, matrices and layouts; must not know models or processes. Called by models and by `program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.backends.base import ExpertLayer, Matrix
from headrace.backends.cuda.matrix import CudaMatrix
from headrace.backends.cuda.ops import CudaOps
from headrace.backends.graph import Value
from headrace.backends.shares import Bounds, DeviceSeat, Layout
from headrace.backends.split import RankMatrix, RankValue, SomeRows, SplitOps, rank_matrix
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.quant.base import MatrixSource


class CudaRankOps(SplitOps):
    """`SplitOps` around this backend's operators."""

    inner: CudaOps
    splits_experts = False

    def __init__(self, inner: CudaOps, seat: DeviceSeat) -> None:
        super().__init__(seat.plan)
        self.inner, self._exchange = inner, seat.exchange

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def matrices(self) -> list[CudaMatrix]:
        return self.inner.matrices

    def matrix(self, source: MatrixSource, bias: Tensor | None = None) -> RankMatrix:
        layout = self._next_layout(source.num_out)
        if layout is None:
            return RankMatrix(self.inner.matrix(source, bias), source.num_in, source.num_out, None)
        bounds = layout.bounds(self.plan.rank)
        part = None if bias is None else torch.cat([bias[begin:end] for begin, end in bounds])
        local = self.inner.matrix(SomeRows(source, bounds), part, source.num_out)
        return RankMatrix(local, source.num_in, source.num_out, layout)

    def gathered(self, x: Value, layout: Layout) -> Value:
        return self.inner.gather(x, layout, self._exchange)

    def picked(self, x: Value, bounds: Sequence[Bounds]) -> Value:
        raise CheckpointError("backend cuda has no kernels that share out queries and keys which a rank has whole")

    def linear(self, x: Any, matrix: Matrix) -> RankValue:
        ranked = rank_matrix(matrix)
        return self._as(self.inner.linear(self.whole(x), ranked.local), ranked.layout)

    def experts(self, x: Any, layer: ExpertLayer, seen: Any = None) -> RankValue:
        first, second = ([rank_matrix(matrix).local for matrix in part] for part in (layer.gate_up, layer.down))
        local = layer._replace(router=rank_matrix(layer.router).local, gate_up=first, down=second)
        return self._full(self.inner.experts(self.whole(x), local, None if seen is None else self.whole(seen)))

    def finite(self, x: Value, flags: Tensor) -> None:
        self.inner.finite(x, flags)

    def best(self, logits: Value, ids: Tensor, finite: Tensor, values: Tensor) -> None:
        self.inner.best(logits, ids, finite, values)
