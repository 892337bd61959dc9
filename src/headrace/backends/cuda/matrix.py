"""Weights on the device: plain rows in the model's dtype, or codes in the layout of the kernel that reads them.

Read from a `MatrixSource` some rows at a time, so that while a model is loaded the peak is what is packed and one slab.
Called by `ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.quant.base import slabs
from headrace.quant.schemes import Scheme

if TYPE_CHECKING:
    from headrace.quant.base import MatrixSource

SCHEMES: frozenset[Scheme] = frozenset()
"""Quantised schemes with kernels; weights of all others are widened to the model's dtype while they are loaded."""


@dataclass(slots=True, eq=False)
class CudaMatrix:
    """A linear layer: `data` [num_out, num_in] in the model's dtype, contiguous; `bias` [num_out] float32."""

    name: str
    scheme: Scheme
    data: Tensor
    num_in: int
    num_out: int
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def dense(self) -> Tensor:
        """Return the weights as float32 [num_out, num_in], for tests and tools."""
        return self.data.float()


def make_matrix(source: MatrixSource, bias: Any, device: torch.device, dtype: torch.dtype) -> CudaMatrix:
    """Copy `source` to the device. Raises `CheckpointError` for weights that do not fit their scheme."""
    data = torch.empty(source.num_out, source.num_in, dtype=dtype, device=device)
    for first, last in slabs(source):
        data[first:last] = source.slab(first, last).dequantize()
    if bias is not None:
        bias = bias.to(device, torch.float32)
    return CudaMatrix(source.name, source.scheme, data, source.num_in, source.num_out, bias)
