"""Experts' matrices, side by side in memory as grouped products read them.

Matrices of experts arrive one after the other while a model is loaded. When the last one of a layer has come, they are
joined, and each keeps a view of its part: there are never two copies of more than one layer's, and the memory of the
pieces is taken again for the next layer's. Called by `ops`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.backends.cuda.kernels.experts import Stack
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.kernels.linear_codes import PackedCodes
from headrace.backends.cuda.matrix import CudaMatrix, Weights

EXPERT = re.compile(r"(.+\.experts)\.\d+\.(.+)")


class Stacks:
    """Joins the matrices that `add` gets, layer by layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._stem: tuple[str | None, ...] = ()
        """The layer of the parts and their names in it."""
        self._parts: list[CudaMatrix] = []

    def add(self, matrix: CudaMatrix) -> None:
        """Take a matrix that was just loaded; join those before it if it is of another layer."""
        match = EXPERT.fullmatch(matrix.name)
        stem = () if match is None else match.groups()
        if stem != self._stem:
            self.close()
        self._stem = stem
        if stem:
            self._parts.append(matrix)

    def close(self) -> None:
        """Join the matrices that came last."""
        parts, self._parts, self._stem = self._parts, [], ()
        if parts:
            join(parts, self._dtype)


def stack_of(parts: Sequence[CudaMatrix], dtype: torch.dtype) -> Stack:
    """Return the experts' matrices as one; those that do not lie side by side are joined now."""
    first = parts[0].place
    if first is None or any(
        part.place is None or part.place[0] is not first[0] or part.place[1] != i for i, part in enumerate(parts)
    ):
        return join(parts, dtype)
    return first[0]


def join(parts: Sequence[CudaMatrix], dtype: torch.dtype) -> Stack:
    """Copy the experts' matrices side by side, and leave a view in each of them. Those of different forms become plain
    weights of `dtype`."""
    each = parts[0].num_out
    data = _joined([part.data for part in parts], dtype)
    biases = [part.bias for part in parts]
    bias = None
    if any(one is not None for one in biases):
        device = (data if isinstance(data, Tensor) else data.codes).device
        bias = torch.cat([torch.zeros(each, device=device) if one is None else one for one in biases])
    stack = Stack(data, len(parts), bias)
    for i, part in enumerate(parts):
        first, last = i * each, (i + 1) * each
        part.data, part.place = _rows(data, first, last), (stack, i)
        if part.bias is not None and bias is not None:
            part.bias = bias[first:last]
    return stack


def _joined(parts: Sequence[Weights], dtype: torch.dtype) -> Weights:
    first = parts[0]
    if isinstance(first, PackedCodes):
        codes = [part for part in parts if isinstance(part, PackedCodes) and part.layout == first.layout]
        if len(codes) == len(parts):
            mins = [part.mins for part in codes if part.mins is not None]
            return dataclasses.replace(
                first,
                codes=torch.cat([part.codes for part in codes]),
                scales=torch.cat([part.scales for part in codes], 1),
                mins=torch.cat(mins, 1) if mins else None,
            )
    elif isinstance(first, EightBits):
        eight = [part for part in parts if isinstance(part, EightBits) and part.grouped == first.grouped]
        if len(eight) == len(parts):
            codes8 = torch.cat([part.codes.view(torch.uint8) for part in eight]).view(first.codes.dtype)
            return EightBits(codes8, torch.cat([part.scales for part in eight]))
    return torch.cat([part if isinstance(part, Tensor) else part.dense().to(dtype) for part in parts])


def _rows(data: Weights, first: int, last: int) -> Weights:
    """Return rows of joined weights, as views."""
    if isinstance(data, PackedCodes):
        mins = None if data.mins is None else data.mins[:, first:last]
        return dataclasses.replace(data, codes=data.codes[first:last], scales=data.scales[:, first:last], mins=mins)
    if isinstance(data, EightBits):
        return EightBits(data.codes[first:last], data.scales[first:last])
    return data[first:last]
