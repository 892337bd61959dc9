"""Weights on the device: plain rows in the model's dtype, or codes in the layout of the kernel that reads them.

Read from a `MatrixSource` some rows at a time, so that while a model is loaded the peak is the packed weights and one
layer. Called by `ops`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from headrace.backends.cuda.kernels.linear_8bit import PIECE, EightBits
from headrace.backends.cuda.kernels.linear_codes import PackedCodes, pack, packs
from headrace.backends.torch_ref.tensors import tensor, weight_of
from headrace.quant.base import slabs
from headrace.quant.schemes import F8_SCHEMES, SCHEMES, Scheme

if TYPE_CHECKING:
    from headrace.backends.cuda.kernels.experts import Stack
    from headrace.quant.base import MatrixSource


E4M3 = torch.float8_e4m3fn


Weights: TypeAlias = "Tensor | PackedCodes | EightBits"


@dataclass(slots=True, eq=False)
class CudaMatrix:
    """A linear layer: `data` [num_out, num_in] in the model's dtype, contiguous, or codes; `bias` [num_out] float32.

    num_whole: outputs of the matrix that these are a part of, by which its sums are cut in spans. place: of an expert,
    the stack of all, of which data and bias are views, and the expert's number."""

    name: str
    scheme: Scheme
    data: Weights
    num_in: int
    num_out: int
    bias: Tensor | None
    num_whole: int
    place: tuple[Stack, int] | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, Tensor) else self.data.num_bytes

    def plain(self) -> Tensor:
        """Return the weights [num_out, num_in] in the model's dtype."""
        return self.data if isinstance(self.data, Tensor) else self.data.dense()

    def dense(self) -> Tensor:
        """Return the weights as float32 [num_out, num_in], for tests and tools."""
        return self.plain().float()


def schemes(dtype: torch.dtype, capability: int) -> frozenset[Scheme]:
    """Return the schemes with kernels for models of `dtype` on a GPU of that compute capability; weights of others are
    widened while they are loaded."""
    if dtype.itemsize != 2:
        return frozenset()
    floats = [scheme for scheme in F8_SCHEMES if scheme.group in (0, PIECE)] if capability >= 90 else []
    return frozenset([*floats, *(scheme for scheme in SCHEMES if packs(scheme))])


def make_matrix(
    source: MatrixSource, bias: Any, device: torch.device, dtype: torch.dtype, num_whole: int = 0
) -> CudaMatrix:
    """Copy `source` to the device. num_whole: as `CudaMatrix` has it; 0: `source` is no part of another.

    Raises `CheckpointError` for weights that do not fit their scheme."""
    data: Weights
    if source.scheme.kind == "f8":
        parts = [weight_of(source.slab(first, last)) for first, last in slabs(source)]
        scales = torch.cat([part.scales for part in parts if part.scales is not None]).float().to(device)
        data = EightBits(torch.cat([part.codes.view(torch.uint8) for part in parts]).to(device).view(E4M3), scales)
    elif source.scheme.kind != "f":
        data = _packed(source, device, dtype)
    else:
        data = torch.empty(source.num_out, source.num_in, dtype=dtype, device=device)
        for first, last in slabs(source):
            data[first:last] = tensor(source.slab(first, last).dequantize())
    if bias is not None:
        bias = bias.to(device, torch.float32)
    return CudaMatrix(
        source.name, source.scheme, data, source.num_in, source.num_out, bias, num_whole or source.num_out
    )


def _packed(source: MatrixSource, device: torch.device, dtype: torch.dtype) -> PackedCodes:
    parts = []
    for first, last in slabs(source):
        part = pack(weight_of(source.slab(first, last)), source.scheme, dtype)
        mins = None if part.mins is None else part.mins.to(device)
        parts.append(dataclasses.replace(part, codes=part.codes.to(device), scales=part.scales.to(device), mins=mins))
    if len(parts) == 1:
        return parts[0]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts], 1)
    minima = [part.mins for part in parts if part.mins is not None]
    return dataclasses.replace(parts[0], codes=codes, scales=scales, mins=torch.cat(minima, 1) if minima else None)
