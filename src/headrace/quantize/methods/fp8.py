"""8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): E4M3, four bits of exponent and three of
fraction, up to 448. Scales bring each output's, group's or matrix's largest weight there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant.base import QWeight
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = False
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def verify(options: Options) -> Options:
    if options.bits != 8 or options.symmetric is False:
        text = f"{options.bits} bits" + (", with zero points" if options.symmetric is False else "")
        raise RequestError("bits", text, f"8, symmetric, for method {options.method}")
    if options.group_size < -1:
        raise RequestError("group_size", options.group_size, "at least 1, -1 (one scale an output) or 0 (one scale)")
    return replace(options, symmetric=True)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    """Return the nearest 8-bit floats, ties to even; numbers beyond the largest become the largest."""
    dtype = DTYPES[options.method]
    num_out, num_in = weight.shape
    group = grid.group_of(options, num_in, name)
    x = weight.view(num_out, -1, group)
    largest = x.abs().amax(-1)
    if options.group_size == 0:
        largest = largest.amax().expand_as(largest)
    end = torch.finfo(dtype).max
    scale = grid.stored(largest / end, options.scale_dtype)
    grid.verify_scales(scale, weight, name)
    divided = x / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    codes = divided.clamp_(-end, end).to(dtype).view(num_out, num_in)
    return QWeight(codes, scale.contiguous(), group=group, bits=8)
