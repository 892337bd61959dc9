"""Weights stored as plain floats: the codes are the weights. The format of checkpoints without quantization_config."""

from __future__ import annotations

import re
from typing import Any

from headrace.quant.base import QWeight, Tensors

SPARE = re.compile(r"(?!)")


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """`<name>.weight` as it is."""
    weight = tensors(f"{name}.weight")
    return QWeight(weight, bits=8 * weight.itemsize)
