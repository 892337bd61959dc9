"""Numpy's arrays of weights as torch tensors, for the backends that compute with torch, and for `quantize`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.quant.arrays import bits_of, type_name
from headrace.quant.base import QWeight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIELDS = ("codes", "scales", "zeros", "mins", "permutation", "codebook", "columns", "kept")


def tensor(values: Any) -> Tensor:
    """Return an array as a tensor of the same type over the same memory. Nobody may write to one of a mapping."""
    if isinstance(values, Tensor):
        return values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        bits = torch.from_numpy(bits_of(values))
    dtype: torch.dtype = getattr(torch, type_name(values))
    return bits.view(dtype) if values.dtype.names else bits


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of which, in main memory, a page is only taken when it is written: torch.zeros writes them all."""
    if device.type != "cpu" or not math.prod(size):
        return torch.zeros(*size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(*size)


def weight_of(weight: QWeight) -> QWeight:
    """Return a weight whose arrays are tensors."""
    parts: dict[str, Any] = {name: getattr(weight, name, None) for name in FIELDS}
    tensors: dict[str, Any] = {name: tensor(part) for name, part in parts.items() if part is not None}
    return replace(weight, **tensors)
