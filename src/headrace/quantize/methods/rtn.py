"""Round to nearest: codes from the weights alone, each group's grid from its least to its largest weight.

The affine codes of Jacob et al. 2018 ("Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-
Only Inference"), and the baseline for other methods.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headrace.quant.base import QWeight
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = False


def verify(options: Options) -> Options:
    return replace(options, symmetric=grid.verify(options, symmetric=True))


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    return grid.quantise(weight, options, name)
