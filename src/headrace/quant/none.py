"""Weights stored as plain floats: the codes are the weights. The format of checkpoints without quantization_config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headrace.quant.base import QWeight


def read(tensor: Callable[[str], Tensor], name: str, config: dict[str, Any]) -> QWeight:
    """`<name>.weight` as it is."""
    weight = tensor(f"{name}.weight")
    return QWeight(weight, bits=8 * weight.element_size())
