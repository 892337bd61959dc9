"""MXFP4 (OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3): 4-bit floats E2M1, 32 of which share a power of two.

The specification's scale brings the largest weight's power of two to E2M1's largest, and clips weights above 6; here
the next power is tried too, and each group gets the one of least squared error.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant.base import QWeight
from headrace.quant.packing import E2M1
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = False
GROUP = 32
LARGEST_POWER = 2
"""Power of two of E2M1's largest number: 6 is 1.5 * 2**2."""
LEAST_EXPONENT, MOST_EXPONENT = -126, 127
BLOCK_WEIGHTS = 2**21


def verify(options: Options) -> Options:
    if options.bits != 4 or options.symmetric is False:
        raise RequestError("bits", options.bits, f"4, symmetric, for method {options.method}")
    if options.group_size != GROUP:
        raise RequestError("group_size", options.group_size, f"{GROUP}, the only one that MXFP4 has")
    return replace(options, symmetric=True)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    num_out, num_in = weight.shape
    grid.group_of(options, num_in, name)
    grid.verify_finite(weight, name)
    x = weight.view(num_out, -1, GROUP)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(x.shape[:2])
    step = max(BLOCK_WEIGHTS // num_in, 1)
    for first in range(0, num_out, step):
        rows = slice(first, first + step)
        codes[rows], scales[rows] = _best(x[rows])
    return QWeight(codes.view(num_out, num_in), scales, group=GROUP, bits=4, codebook=torch.tensor(E2M1))


def _best(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [rows, groups, 32] and scales [rows, groups]."""
    _, exponent = torch.frexp(x.abs().amax(-1))
    low = torch.exp2((exponent - 1 - LARGEST_POWER).clamp(LEAST_EXPONENT, MOST_EXPONENT - 1).float())
    trials = [(_nearest(x, scale), scale) for scale in (low, 2 * low)]
    errors = [(x - torch.tensor(E2M1)[codes.int()] * scale.unsqueeze(-1)).square_().sum(-1) for codes, scale in trials]
    first = errors[0] <= errors[1]
    return torch.where(first.unsqueeze(-1), trials[0][0], trials[1][0]), torch.where(first, low, 2 * low)


def _nearest(x: Tensor, scale: Tensor) -> Tensor:
    sizes = torch.tensor(E2M1[:8])
    places = torch.bucketize((x / scale.unsqueeze(-1)).abs_(), (sizes[1:] + sizes[:-1]) / 2)
    return (places + 8 * (x < 0)).to(torch.uint8)
