"""Which kernel can take a checkpoint's codes as they are, and the codes in that kernel's form.

int4 kernels compute (code - 8) * scale or code * scale + minimum with codes 0 ... 15, int8 kernels code * scale with
codes -128 ... 127; scales lie in groups of 32, 64 or 128 inputs as float16, or (int8) one float32 for each output.
Codes of fewer bits, other zero points and larger groups are said in these forms where that loses nothing; scales and
minimums that float16 does not hold are rounded, and `Fit.rounding` says by how much. What is left has no kernel and is
dequantised. Knows no checkpoints and no backends. Called by `runner.loader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.quant.base import QWeight
from headrace.quant.schemes import Scheme

GROUPS = (128, 64, 32)
CHANNEL_GROUP = 128
"""Group of int4 weights that have one scale for each output: activations are quantised in groups of it."""

MOST_ROUNDING = 2.0**-8
"""Of a scale, as a share of it: bfloat16's own. Beyond it a matrix is dequantised rather than moved."""
SMALL = 2.0**-12
"""Groups whose scale is a smaller share than this of the matrix's largest are measured by it: they are all but zero."""


class Fit(NamedTuple):
    """scheme: of the kernel, or None, and then why. rounding: the largest change of a weight, in steps of its code."""

    scheme: Scheme | None
    why: str = ""
    rounding: float = 0.0


def fit_of(weights: Sequence[QWeight]) -> Fit:
    """How weights that are stacked to one matrix run: on one kernel, or on none."""
    fits = [_fit(weight) for weight in weights]
    schemes = [fit.scheme for fit in fits if fit.scheme is not None]
    if len(schemes) < len(fits):
        return next(fit for fit in fits if fit.scheme is None)
    if len({(scheme.kind, scheme.group == 0) for scheme in schemes}) > 1:
        return Fit(None, "its parts have codes of different kinds")
    has_min = any(scheme.has_min for scheme in schemes)
    rounding = max(fit.rounding for fit in fits)
    if has_min:
        rounding = max(rounding, *(_min_rounding(weight) for weight in weights))
    # Groups are 32, 64 or 128, so the least divides the others.
    return Fit(Scheme(schemes[0].kind, min(scheme.group for scheme in schemes), has_min), "", rounding)


def fitted(weight: QWeight, scheme: Scheme) -> QWeight:
    """The same weights as codes of `scheme`, which `fit_of` gave for them; for some rows or all."""
    if weight.scales is None:
        raise ValueError("plain weights have no codes to be fitted")
    zeros, codes = weight.zeros, weight.codes
    if scheme.kind == "i8":
        if zeros is not None:
            codes = (codes.to(torch.int16) - _wide(zeros, weight).to(torch.int16)).to(torch.int8)
        scales = weight.scales if scheme.group == 0 else _regrouped(weight.scales, weight, scheme.group).half().float()
        return QWeight(codes, scales, group=scheme.group or weight.shape[1], bits=8)
    scales = _regrouped(weight.scales, weight, scheme.group).half().float()
    if scheme.has_min:
        mins = _regrouped(_minimums(weight, weight.scales), weight, scheme.group).half().float()
        return QWeight(codes, scales, mins=mins, group=scheme.group, bits=4)
    if zeros is not None and not bool((zeros == 8).all()):
        codes = (codes.to(torch.int16) + 8 - _wide(zeros, weight).to(torch.int16)).to(torch.uint8)
    elif zeros is None:
        codes = codes + 8
    return QWeight(codes, scales, torch.full((1, 1), 8.0).expand(scales.shape), group=scheme.group, bits=4)


def _fit(weight: QWeight) -> Fit:
    why = _why_not(weight)
    if why or weight.scales is None:
        return Fit(None, why)
    channel = weight.scales.shape[1] == 1
    if weight.bits > 4 and channel:
        return Fit(Scheme("i8"))
    rounding = _rounding(weight.scales)
    if rounding > MOST_ROUNDING:
        return Fit(None, "float16 does not hold its scales")
    moved = rounding * 2.0**weight.bits  # of the outermost code
    group = CHANNEL_GROUP if channel else next(size for size in GROUPS if weight.group % size == 0)
    if weight.bits > 4:
        return Fit(Scheme("i8", group), "", moved)
    whole = weight.mins is None and (weight.zeros is None or _is_whole(weight.zeros))
    if whole and (weight.bits < 4 or (weight.zeros is not None and bool((weight.zeros == 8).all()))):
        return Fit(Scheme("i4", group), "", moved)
    least = _min_rounding(weight)
    if least > 1.0:
        return Fit(None, "float16 does not hold its minimums")
    return Fit(Scheme("i4", group, True), "", moved + least)


def _why_not(weight: QWeight) -> str:
    """Why no kernel has the form of `weight`, or ""."""
    if weight.scales is None:
        return "it is not quantised"
    if weight.codebook is not None:
        return f"codes of {weight.bits} bits from a table have no kernel"
    if weight.codes.is_floating_point():
        return "8-bit floats have no kernel"
    if weight.permutation is not None:
        return "its groups are of inputs that do not lie side by side (act-order)"
    if weight.scales.shape[1] > 1 and all(weight.group % size for size in GROUPS):
        return f"groups of {weight.group} have no kernel"
    if weight.bits > 4:
        return _why_not_i8(weight)
    if weight.codes.dtype != torch.uint8:
        return "signed codes of 4 bits have no kernel"
    return ""


def _why_not_i8(weight: QWeight) -> str:
    if weight.bits > 8 or weight.mins is not None or (weight.zeros is not None and not _is_whole(weight.zeros)):
        return f"codes of {weight.bits} bits with minimums have no kernel"
    if weight.zeros is None:
        return "" if weight.codes.dtype == torch.int8 or weight.bits < 8 else "unsigned codes of 8 bits have no kernel"
    if weight.bits == 8 and not bool((weight.zeros == 128).all() and weight.codes.dtype == torch.uint8):
        return "codes of 8 bits with a zero point have no kernel"
    return ""


def _is_whole(zeros: Tensor) -> bool:
    return bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros < 256)).all())


def _minimums(weight: QWeight, scales: Tensor) -> Tensor:
    """What code 0 stands for: [out, groups]."""
    least = torch.zeros_like(scales) if weight.mins is None else weight.mins
    return least if weight.zeros is None else least - weight.zeros * scales.half().float()


def _min_rounding(weight: QWeight) -> float:
    """The largest change of a minimum by rounding it to float16, in steps of codes; inf beyond float16."""
    if weight.scales is None:
        return 0.0
    least = _minimums(weight, weight.scales)
    return _largest_share((least.half().float() - least).abs(), weight.scales)


def _rounding(scales: Tensor) -> float:
    """The largest relative change of a scale by rounding it to float16; inf beyond float16."""
    return _largest_share((scales.half().float() - scales).abs(), scales)


def _largest_share(moved: Tensor, scales: Tensor) -> float:
    sizes = scales.abs()
    sizes = torch.maximum(sizes, sizes.max() * SMALL)
    return float(torch.where(moved == 0, 0.0, moved / sizes).nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _wide(part: Tensor, weight: QWeight) -> Tensor:
    """[out, groups] as [out, in]; a column if there is one group only."""
    if part.shape[1] == 1:
        return part
    return part.repeat_interleave(weight.group, 1)[:, : weight.shape[1]]


def _regrouped(part: Tensor, weight: QWeight, group: int) -> Tensor:
    """[out, groups of weight.group] as [out, groups of `group`]."""
    num_groups = -(-weight.shape[1] // group)
    if part.shape[1] == 1:
        return part.expand(-1, num_groups)
    return part.repeat_interleave(weight.group // group, 1)[:, :num_groups]
