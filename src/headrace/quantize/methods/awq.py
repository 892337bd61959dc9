"""AWQ (Lin et al. 2024: "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration"):
inputs that are large on average get a scale that makes their weights' codes finer (section 3.2, equations 4 and 5),
and the operation before divides by it; then each group's grid is narrowed where that lowers the error.

Both searches measure the squared error of a layer's outputs on the calibration text, by the mean of x x^T.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.quant.base import QWeight, widened
from headrace.quantize import fold as folding
from headrace.quantize import grid
from headrace.quantize.base import Fold, Layer, Options, Statistics

CALIBRATED = True
NUM_RATIOS = 20
"""Exponents to try, from 0 (no scale) up to but not including 1."""
NUM_ENDS, MOST_SHRINK = 20, 0.5
MOST_ROWS = 512
"""Outputs of each layer that the search for scales uses, evenly spaced."""
CLIP_WEIGHTS = 2**22
NOT_CLIPPED = ("q_proj", "k_proj")
"""Their outputs are multiplied with each other, so that the error of one layer's outputs is no measure."""


def verify(options: Options) -> Options:
    return replace(options, symmetric=grid.verify(options, symmetric=False))


def prepare(layer: Layer, options: Options) -> None:
    for fold in layer.folds:
        statistics = [layer.statistics[name] for name in fold.after if name in layer.statistics]
        if statistics and statistics[0].num_rows:
            scales = search(layer, fold, statistics[0], options)
            if scales is not None:
                folding.apply(layer, fold, scales)


def search(layer: Layer, fold: Fold, statistics: Statistics, options: Options) -> Tensor | None:
    """Return the scales of the outputs of `fold.before` with the least error, or None for no scales."""
    sizes = folding.pooled(fold, statistics.mean_abs).clamp_min(1e-6)
    rows = [weight[:: -(-len(weight) // MOST_ROWS)] for weight in (layer.weights[name] for name in fold.after)]
    best, best_error = None, torch.inf
    for i in range(NUM_RATIOS):
        scales = sizes ** (i / NUM_RATIOS)
        scales = scales / torch.sqrt(scales.max() * scales.min())
        factors = scales[fold.index]
        error = 0.0
        for name, weight in zip(fold.after, rows, strict=True):
            approximation = grid.quantise(weight * factors, options, name).dequantize() / factors
            difference = approximation - weight
            error += float(torch.sum(torch.mm(difference, statistics.hessian) * difference))
        if error < best_error:
            best, best_error = (None if i == 0 else scales), error
    return best


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    may_clip = options.clip and options.group_size != 0 and not name.endswith(NOT_CLIPPED)
    if statistics is None or not statistics.num_rows or not may_clip:
        return grid.quantise(weight, options, name)
    group = grid.group_of(options, weight.shape[1], name)
    if group == weight.shape[1]:
        return grid.quantise(weight, options, name)
    step = max(1, CLIP_WEIGHTS // weight.shape[1])
    clipped = torch.cat([_clipped(part, statistics.hessian, group, options) for part in torch.split(weight, step)])
    return grid.quantise(weight, options, name, grid_of=clipped)


def _clipped(weight: Tensor, hessian: Tensor, group: int, options: Options) -> Tensor:
    """[rows, in] with every group clipped where the error is least."""
    x = weight.view(len(weight), -1, group)
    blocks = torch.stack([hessian[i : i + group, i : i + group] for i in range(0, len(hessian), group)])
    largest = x.abs().amax(-1)
    best, best_error = largest, torch.full_like(largest, torch.inf)
    for i in range(int(NUM_ENDS * MOST_SHRINK)):
        end = largest * (1 - i / NUM_ENDS)
        scale, zero = grid.find(x.clamp(-end.unsqueeze(-1), end.unsqueeze(-1)), options)
        difference = grid.rounded(x, scale.unsqueeze(-1), zero.unsqueeze(-1), options.bits).sub_(x)
        weighted = torch.bmm(difference.transpose(0, 1), blocks).transpose(0, 1)
        error = (weighted * difference).sum(-1)
        better = error < best_error
        best, best_error = torch.where(better, end, best), torch.where(better, error, best_error)
    end = widened(best, group, weight.shape[1])
    return weight.clamp(-end, end)
