"""Numbers rounded to the values of quantised codes: a layer's cache, the oracle of the native caches, and the inputs of
weights of 8-bit floats (fp8 x fp8).

A cache's numbers are rounded to codes as csrc/include/kernels.h defines them, and widened again at once. Knows tensors;
must not know requests. Called by `cache` and `ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.quant.base import Inputs

KINDS = ("int8", "int8_dot", "int4", "fp8_e4m3", "fp8_e5m2")
E4M3_MOST = 448.0
LEAST = 1e-12
"""The least that a row's greatest magnitude counts as, so that a row of zeros has a scale."""


def as_stored(x: Tensor, dtype: str) -> Tensor:
    """Return x [..., D] float32 rounded to `dtype` and back, with scales over the last axis where it has them."""
    if dtype == "fp8_e5m2":
        return x.to(torch.float8_e5m2).float()
    if dtype == "int4":
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step, least = ((high - low) / 15).bfloat16().float(), low.bfloat16().float()
        codes = torch.where(step > 0, torch.round((x - least) * (1 / step)).clamp(0, 15), 0)
        return codes * step + least
    amax = x.abs().amax(-1, keepdim=True)
    whole = dtype != "fp8_e4m3"
    most = 127.0 if whole else E4M3_MOST
    inverse = torch.where(amax > 0, most / amax, 0)
    codes = (x * inverse).clamp(-most, most)
    codes = torch.round(codes) if whole else codes.to(torch.float8_e4m3fn).float()
    return codes * (amax / most)


def e4m3_rows(x: Tensor, inputs: Inputs) -> Tensor:
    """Return x [R, K] float32 as E4M3 times its scale (Micikevicius et al. 2022), each row by itself.

    Numbers beyond the largest code times a static scale become the largest.
    """
    if inputs.scale is not None:
        scale = x.new_tensor(inputs.scale)
        return (x / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).float() * scale
    width = x.shape[-1]
    group = inputs.group or width
    pieces = F.pad(x, (0, -width % group)).view(len(x), -1, group)
    scale = pieces.abs().amax(-1, keepdim=True).clamp(min=LEAST) / E4M3_MOST
    codes = (pieces / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).float()
    return (codes * scale).flatten(-2)[..., :width]
