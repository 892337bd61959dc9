"""8-bit floats with five bits of exponent and two of fraction (E5M2; Micikevicius et al. 2022): a wider range than
E4M3, at twice the rounding error."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.quant.base import QWeight
from headrace.quantize.base import Layer, Options, Statistics
from headrace.quantize.methods import fp8

CALIBRATED = False


def verify(options: Options) -> Options:
    return fp8.verified(options)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    return fp8.as_floats(weight, options, torch.float8_e5m2, name)
