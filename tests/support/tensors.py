"""Functions of `headrace.quant`, which work on numpy arrays, over the torch tensors that tests make and compare."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.torch_ref.tensors import FIELDS, tensor, weight_of
from headrace.quant import fit, rtn
from headrace.quant.arrays import BF16, E4M3, E5M2
from headrace.quant.base import QWeight
from headrace.quant.fit import Fit
from headrace.quant.formats import gguf_blocks
from headrace.quant.schemes import SCHEMES, Scheme

TYPES = {torch.bfloat16: BF16, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def array(values: Tensor) -> NDArray[Any]:
    """The inverse of `tensor`."""
    if values.dtype not in TYPES:
        return values.numpy()
    bits = torch.int16 if values.dtype == torch.bfloat16 else torch.uint8
    return np.ascontiguousarray(values.contiguous().view(bits).numpy()).view(TYPES[values.dtype])


def arrays_of(weight: QWeight) -> QWeight:
    """The inverse of `weight_of`."""
    parts: dict[str, Any] = {name: getattr(weight, name, None) for name in FIELDS}
    return replace(weight, **{name: array(part) for name, part in parts.items() if isinstance(part, Tensor)})


def quantise(weight: Tensor, scheme: Scheme, name: str = "a weight") -> QWeight:
    return weight_of(rtn.quantise(array(weight), scheme, name))


def fit_of(weights: Sequence[QWeight], schemes: Collection[Scheme] = SCHEMES, *, permutes: bool = True) -> Fit:
    result = fit.fit_of([arrays_of(weight) for weight in weights], schemes, permutes=permutes)
    return result if result.columns is None else result._replace(columns=tensor(result.columns))


def fitted(weight: QWeight, scheme: Scheme) -> QWeight:
    return weight_of(fit.fitted(arrays_of(weight), scheme))


def decode(kind: str, raw: NDArray[np.uint8]) -> QWeight:
    return weight_of(gguf_blocks.decode(kind, raw))


def native(weight: QWeight, kind: str, scheme: Scheme, name: str) -> QWeight:
    return weight_of(gguf_blocks.native(arrays_of(weight), kind, scheme, name))
