"""HQQ (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"): zero points that make a
sparse norm of the weights' errors small, found without any data.

The error W - s (round(W / s + z) - z) is split from what stands for its outliers, W_e, and both are solved for in turn:
W_e by the generalised soft threshold of the l_p norm (p < 1), z by the mean over each group. Weights are measured in
steps of their scale here, so that the threshold means the same in every group. Zero points are whole in the layouts
that headrace writes: each group keeps the best whole number met on the way, round to nearest's own among them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant.base import QWeight, widened
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = False
NORM = 0.7
BETA = 10.0
KAPPA = 1.01
NUM_ROUNDS = 20
SHARES = (1.0, 0.92, 0.84)
"""Scales that are tried: a whole zero point alone leaves little to choose."""
BLOCK_WEIGHTS = 2**21


def verify(options: Options) -> Options:
    if options.symmetric:
        raise RequestError("symmetric", True, "false: it is zero points that HQQ chooses")
    if options.group_size == 0:
        raise RequestError("group_size", 0, "at least 1, or -1 (one scale an output): HQQ chooses for each group")
    grid.verify(options, symmetric=False)
    return replace(options, symmetric=False)


def prepare(layer: Layer, options: Options) -> None:
    """Nothing moves."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    num_out, num_in = weight.shape
    group = grid.group_of(options, num_in, name)
    x = weight.view(num_out, -1, group)
    scale, zero = grid.find(x, options)
    grid.verify_scales(scale, weight, name)
    step = max(BLOCK_WEIGHTS // num_in, 1)
    for first in range(0, num_out, step):
        rows = slice(first, first + step)
        scale[rows], zero[rows] = _best(x[rows], scale[rows], zero[rows], options)
    codes = grid.code(weight, widened(scale, group, num_in), widened(zero, group, num_in), options.bits)
    return QWeight(codes.to(torch.uint8), scale, zero, group=group, bits=options.bits)


def loss(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The l_p norm of each group's errors in its weights' own units, to the p; x [..., group] -> [...]."""
    lost = (x - grid.rounded(x, scale.unsqueeze(-1), zero.unsqueeze(-1), bits)).abs_()
    return lost.pow_(NORM).sum(-1)


def _best(x: Tensor, scale: Tensor, zero: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Scales and whole zero points [rows, groups] of the least loss among those that the rounds come by."""
    best_scale, best_zero, least = scale, zero, loss(x, scale, zero, options.bits)
    for share in SHARES:
        trial = grid.stored(scale * share, options.scale_dtype)
        seen = None
        for real in _zeros(x, trial, zero, options.bits):
            whole = torch.round(real).clamp_(1, 2**options.bits - 1)
            if seen is not None and torch.equal(whole, seen):
                continue
            seen = whole
            found = loss(x, trial, whole, options.bits)
            better = found < least
            best_scale, best_zero = torch.where(better, trial, best_scale), torch.where(better, whole, best_zero)
            least = torch.where(better, found, least)
    return best_scale, best_zero


def _zeros(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> list[Tensor]:
    """The zero points of each half-quadratic round, not rounded."""
    steps = x / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    beta, made = BETA, [zero]
    for _ in range(NUM_ROUNDS):
        codes = torch.round(steps + zero.unsqueeze(-1)).clamp_(0, 2**bits - 1)
        lost = steps - (codes - zero.unsqueeze(-1))
        size = lost.abs()
        outliers = torch.sign(lost) * (size - size.clamp_min(1e-8).pow(NORM - 1) / beta).clamp_min_(0)
        zero = (codes - steps + outliers).mean(-1)
        made.append(zero)
        beta *= KAPPA
    return made
