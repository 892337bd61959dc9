"""Scales that pass between neighbours: what a norm or a linear layer gives out is divided, what takes it in multiplied.

The model computes the same numbers before and after, up to float32's rounding: a norm's new weight is rounded to the
dtype in which it is stored, and the neighbours are multiplied by what that makes the scale. Called by the methods.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.quantize.base import Fold, Layer, Statistics


def pooled(fold: Fold, values: Tensor) -> Tensor:
    """Values of the inputs of `fold.after` as values of the outputs of `fold.before`: the means of those it feeds."""
    size = int(fold.index.max()) + 1
    sums = torch.zeros(size).index_add_(0, fold.index, values)
    return sums / torch.bincount(fold.index, minlength=size)


def apply(layer: Layer, fold: Fold, scales: Tensor) -> None:
    """Divide the outputs of `fold.before` by `scales`, multiply the inputs of `fold.after`."""
    if fold.before in layer.norms:
        offset = layer.offsets[fold.before]
        old = layer.norms[fold.before]
        new = (old + offset).div(scales).sub(offset).to(layer.stored).float()
        usable = ((old + offset) != 0) & ((new + offset) != 0) & torch.isfinite(new)
        new = torch.where(usable, new, old)
        scales = (old + offset) / torch.where(usable, new + offset, 1.0)
        scales = torch.where(usable, scales, 1.0)
        layer.norms[fold.before] = new
    else:
        layer.weights[fold.before].div_(scales.unsqueeze(1))
        if fold.before in layer.biases:
            bias = layer.biases[fold.before] / scales
            layer.biases[fold.before] = bias.to(layer.stored).float()
    own = scales[fold.index]
    seen: dict[int, Statistics] = {}
    for name in fold.after:
        layer.weights[name].mul_(own)
        if name in layer.statistics:
            before = layer.statistics[name]
            if id(before) not in seen:
                seen[id(before)] = before.divided(own)
            layer.statistics[name] = seen[id(before)]
