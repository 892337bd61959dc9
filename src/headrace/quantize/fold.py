"""Moves scales between neighbours: divides the outputs of a norm or linear layer, multiplies the weights they feed.

The model computes the same numbers before and after, up to float32's rounding: a norm's new weight is rounded to the
dtype in which it is stored, and the layers after it are multiplied by the scale that results. Called by the methods.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.quantize.base import Fold, Layer, Statistics


def pooled(fold: Fold, values: Tensor) -> Tensor:
    """Values [in] of the inputs of `fold.after` as values of the outputs of `fold.before`, which are means of them."""
    size = int(fold.index.max()) + 1
    sums = torch.zeros(size).index_add_(0, fold.index, values)
    return sums / torch.bincount(fold.index, minlength=size)


def apply(layer: Layer, fold: Fold, scales: Tensor) -> None:
    """Divide the outputs of `fold.before` by `scales`, and multiply the weights of `fold.after` by them."""
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
    factors = scales[fold.index]
    divided: dict[int, Statistics] = {}
    for name in fold.after:
        layer.weights[name].mul_(factors)
        if name in layer.statistics:
            before = layer.statistics[name]
            if id(before) not in divided:
                divided[id(before)] = before.divided(factors)
            layer.statistics[name] = divided[id(before)]
