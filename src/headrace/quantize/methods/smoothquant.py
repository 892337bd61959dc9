"""SmoothQuant (Xiao et al. 2023: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", section 4, equation 4): the difficulty of large activations is moved into the weights by a scale for each
input, max|x|^alpha / max|w|^(1 - alpha), and the norm before divides by it. Weights then have 8 bits and one scale for
each output; activations are quantised to 8 bits at run time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant.base import QWeight
from headrace.quantize import fold as folding
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = True
LEAST = 1e-5


def verify(options: Options) -> Options:
    if not grid.verify(options, symmetric=True, bits=(8,)):
        raise RequestError("symmetric", False, "left out for method smoothquant, whose codes are symmetric")
    if not 0 <= options.alpha <= 1:
        raise RequestError("alpha", options.alpha, "from 0 to 1")
    return replace(options, symmetric=True)


def prepare(layer: Layer, options: Options) -> None:
    for fold in layer.folds:
        statistics = [layer.statistics[name] for name in fold.after if name in layer.statistics]
        if fold.before not in layer.norms or not statistics or not statistics[0].num_rows:
            continue
        peaks = torch.stack([layer.weights[name].abs().amax(0) for name in fold.after]).amax(0)
        scales = statistics[0].max_abs.clamp_min(LEAST) ** options.alpha / peaks.clamp_min(LEAST) ** (1 - options.alpha)
        folding.apply(layer, fold, scales.clamp_min(LEAST))


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    return grid.quantise(weight, options, name)
