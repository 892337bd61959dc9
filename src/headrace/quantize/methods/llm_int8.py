"""LLM.int8() (Dettmers et al. 2022): weights in 8 bits with a scale for each output, but 16 bits for the few inputs
whose activations are far larger than the rest and would make the activations' scales too coarse.

The paper finds those inputs at run time, by a threshold; here the calibration text finds them once, so that they can be
stored, as `quant.formats.bitsandbytes` reads them, next to codes for all inputs, which other software reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import SplitWeight
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = True
THRESHOLD = 6.0
"""Magnitude from which an activation is an outlier (section 3.2)."""
MAX_SHARE = 0.25
"""Share of the inputs that may be outliers at most."""


@dataclass(frozen=True, slots=True)
class Int8Weight(SplitWeight):
    """Adds the largest magnitude of each output, float32 [out], which is 127 times the scale."""

    largest: Tensor | None = None


def verify(options: Options) -> Options:
    if options.bits != 8 or options.symmetric is False:
        raise RequestError("bits", options.bits, f"8, symmetric, for method {options.method}")
    if options.group_size != -1:
        raise RequestError("group_size", options.group_size, "-1: LLM.int8() has one scale for each output")
    return replace(options, symmetric=True)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> Int8Weight:
    largest = weight.abs().amax(1)
    scale = (largest / 127).unsqueeze(1)
    grid.verify_scales(scale, weight, name)
    codes = torch.round(weight / torch.where(scale == 0, 1.0, scale)).to(torch.int8)
    columns = outliers(statistics, weight.shape[1])
    outlier_weights = None if columns is None else weight[:, columns].to(torch.bfloat16)
    if outlier_weights is not None and not bool(torch.isfinite(outlier_weights).all()):
        raise CheckpointError(f"{name} has a weight beyond bfloat16")
    return Int8Weight(
        codes, scale, group=weight.shape[1], bits=8, columns=columns, kept=outlier_weights, largest=largest
    )


def outliers(statistics: Statistics | None, num_in: int) -> Tensor | None:
    """Inputs whose activations reach `THRESHOLD`, at most the largest `MAX_SHARE` of all inputs; None for none."""
    if statistics is None or not statistics.num_rows:
        return None
    columns = torch.nonzero(statistics.max_abs >= THRESHOLD).flatten()
    most = max(int(MAX_SHARE * num_in), 1)
    if len(columns) > most:
        columns = statistics.max_abs.topk(most).indices.sort().values
    return columns if len(columns) else None
