"""HQQ (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"): zero points that make a
sparse norm of the weights' errors small, computed without any data.

The error W - s (round(W / s + z) - z) is split from its outliers, W_e, and both are solved for in turn: W_e by the
generalised soft threshold of the l_p norm (p < 1), z by the mean over each group. Weights are measured in steps of
their scale here, so that the threshold is the same in every group. Zero points are integers in the layouts that
headrace writes: each group gets the best integer of all rounds, of which round to nearest is one.
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
"""Scales to try, because an integer zero point alone leaves little choice."""
BLOCK_WEIGHTS = 2**21


def verify(options: Options) -> Options:
    if options.symmetric:
        raise RequestError("symmetric", True, "false: it is zero points that HQQ chooses")
    if options.group_size == 0:
        raise RequestError("group_size", 0, "at least 1, or -1 (one scale an output): HQQ chooses for each group")
    grid.verify(options, symmetric=False)
    return replace(options, symmetric=False)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


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
    """Return the l_p norm of each group's errors in its weights' own units, to the p; x [..., group] -> [...]."""
    differences = (x - grid.rounded(x, scale.unsqueeze(-1), zero.unsqueeze(-1), bits)).abs_()
    return differences.pow_(NORM).sum(-1)


def _best(x: Tensor, scale: Tensor, zero: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return scales and integer zero points [rows, groups] of the least loss in all rounds."""
    best_scale, best_zero, least = scale, zero, loss(x, scale, zero, options.bits)
    for share in SHARES:
        trial = grid.stored(scale * share, options.scale_dtype)
        last_zeros = None
        for real in _zeros(x, trial, zero, options.bits):
            whole = torch.round(real).clamp_(1, 2**options.bits - 1)
            if last_zeros is not None and torch.equal(whole, last_zeros):
                continue
            last_zeros = whole
            trial_loss = loss(x, trial, whole, options.bits)
            better = trial_loss < least
            best_scale, best_zero = torch.where(better, trial, best_scale), torch.where(better, whole, best_zero)
            least = torch.where(better, trial_loss, least)
    return best_scale, best_zero


def _zeros(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> list[Tensor]:
    """Return the zero points of each half-quadratic round, not rounded."""
    steps = x / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    beta, zeros = BETA, [zero]
    for _ in range(NUM_ROUNDS):
        codes = torch.round(steps + zero.unsqueeze(-1)).clamp_(0, 2**bits - 1)
        differences = steps - (codes - zero.unsqueeze(-1))
        size = differences.abs()
        outliers = torch.sign(differences) * (size - size.clamp_min(1e-8).pow(NORM - 1) / beta).clamp_min_(0)
        zero = (codes - steps + outliers).mean(-1)
        zeros.append(zero)
        beta *= KAPPA
    return zeros
