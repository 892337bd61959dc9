"""Affine grids: the scale and the zero point of each group of weights.

The quantisation of Jacob et al. 2018 (section 2.1), as Frantar et al. 2023 ("GPTQ", section 4) and Lin et al. 2024
("AWQ", section 2) use it: weight = (code - zero) * scale with integer codes and zero points. Called by the methods.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight, widened
from headrace.quantize.base import Options

LEAST_F16 = 2.0**-24
MAX_F16 = 65504.0
CODES_8 = 127.0
LEAST_GROUP, MOST_GROUP = 8, 128
"""Groups that are proposed: those of the kernels."""


def verify(options: Options, *, symmetric: bool, bits: tuple[int, ...] = (2, 3, 4, 8)) -> bool:
    """Return whether codes are symmetric; `symmetric` is the default. Raises `RequestError` for invalid options."""
    if options.bits not in bits:
        listed = ", ".join(map(str, bits))
        raise RequestError("bits", options.bits, f"one of {listed} for method {options.method}")
    if options.group_size < -1:
        raise RequestError("group_size", options.group_size, "at least 1, -1 (one scale an output) or 0 (one scale)")
    return symmetric if options.symmetric is None else options.symmetric


def largest_group(num_in: int, most: int) -> int:
    """Return the largest power of two, at most `most`, that divides `num_in`."""
    group = num_in & -num_in
    while group > most:
        group //= 2
    return group


def group_of(options: Options, num_in: int, name: str, common: int = 0) -> int:
    """Return the inputs of a group. Raises `CheckpointError`, which names groups that fit, if they do not divide
    `num_in`. common: a divisor of the inputs of all layers, which those groups divide too."""
    if options.group_size < 1:
        return num_in
    if num_in % options.group_size:
        largest = largest_group(math.gcd(num_in, common), MOST_GROUP)
        fitting = [2**i for i in reversed(range(LEAST_GROUP.bit_length() - 1, largest.bit_length()))]
        raise CheckpointError(
            f"{name} has {num_in} inputs, no multiple of group_size {options.group_size}; group_size may be "
            f"{', '.join(map(str, [*fitting, '-1 (one scale an output)']))} for this model"
        )
    return options.group_size


def find(x: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Scales (as stored, in float32) and integer zero points [...] that reach the ends of each group of x [..., group].

    Zero points are at least 1, the least that GPTQ's layout can store.
    """
    low, high = x.amin(-1).clamp_max(0.0), x.amax(-1).clamp_min(0.0)
    most = 2**options.bits - 1
    if options.group_size == 0:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    if options.symmetric:
        # 8 bits have codes enough to leave the least unused, so that nothing is cut off at the upper end.
        scale = torch.maximum(high, -low) / (most / 2 if options.bits < 8 else CODES_8)
        scale = stored(scale, options.scale_dtype)
        return scale, torch.full_like(scale, (most + 1) // 2)
    scale = stored((high - low) / most, options.scale_dtype)
    zero = torch.round(-low / torch.where(scale == 0, 1.0, scale)).clamp(0, most)
    positive = zero == 0
    scale = torch.where(positive, stored(high / (most - 1), options.scale_dtype), scale)
    return scale, torch.where(positive, 1.0, zero)


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to numbers that `dtype` and float16 both hold, as float32, so that kernels and layouts agree."""
    if dtype == torch.float32:
        return scale
    near = scale.to(dtype).float()
    return torch.where(scale == 0, 0.0, near.half().float().clamp_min(LEAST_F16))


def code(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the nearest codes of x, as float32; all broadcast."""
    return torch.round(x / torch.where(scale == 0, 1.0, scale)).add_(zero).clamp_(0, 2**bits - 1)


def rounded(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the numbers that the nearest codes stand for."""
    return code(x, scale, zero, bits).sub_(zero).mul_(scale)


def quantise(weight: Tensor, options: Options, name: str, grid_of: Tensor | None = None) -> QWeight:
    """Round [out, in] to nearest. grid_of: the weights that the grid is fitted to, if not `weight`."""
    num_out, num_in = weight.shape
    group = group_of(options, num_in, name)
    scale, zero = find((weight if grid_of is None else grid_of).view(num_out, -1, group), options)
    verify_scales(scale, weight, name)
    wide = [widened(part, group, num_in) for part in (scale, zero)]
    codes = code(weight, wide[0], wide[1], options.bits).to(torch.uint8)
    return QWeight(codes, scale, zero, group=group, bits=options.bits)


def verify_finite(weight: Tensor, name: str) -> None:
    """Raises `CheckpointError` if a weight is not finite."""
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(f"{name} has a weight that is not finite; it can not be quantised")


def verify_scales(scale: Tensor, weight: Tensor, name: str) -> None:
    """Raises `CheckpointError` if weights or their scales are not finite."""
    if bool(torch.isfinite(scale).all()):
        return
    verify_finite(weight, name)
    raise CheckpointError(
        f"{name} has weights as large as {weight.abs().max().item():.3g}; their scale is beyond float16 ({MAX_F16:g})"
    )
