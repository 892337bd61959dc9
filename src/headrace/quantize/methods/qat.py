"""Quantisation-aware training (`quantize.training`): the whole model learns with its weights rounded, before its layers
are written. Without a step the codes are those of round to nearest."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant.base import QWeight
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = True
MOST_STEPS = 10**6


def verify(options: Options) -> Options:
    symmetric = grid.verify(options, symmetric=True)
    if not 0 <= options.num_steps <= MOST_STEPS:
        raise RequestError("num_steps", options.num_steps, f"from 0 to {MOST_STEPS}")
    if not 0 <= options.learning_rate <= 1:
        raise RequestError("learning_rate", options.learning_rate, "from 0 (the usual of the bits) to 1")
    return replace(options, symmetric=symmetric)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    return grid.quantise(weight, options, name)
