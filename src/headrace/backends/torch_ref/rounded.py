"""Numbers rounded to what quantised codes stand for: a layer's cache, the oracle of the native caches, and the inputs
of weights of 8-bit floats (fp8 x fp8).

A cache's numbers are rounded to codes as csrc/include/kernels.h defines them, and widened again at once: it holds
float32, so it shows what rounding costs and saves no memory. Knows tensors; must not know requests. Made by
`program`, used by `ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.base import RopeTable
from headrace.backends.key_means import mean_key
from headrace.quant.base import Inputs

KINDS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")
E4M3_MOST = 448.0
LEAST = 1e-12
"""The least that a row's greatest magnitude counts as, so that a row of zeros has a scale."""


@dataclass(slots=True, eq=False)
class RoundedCache:
    """data float32 [2, num_blocks, block_size, kv_heads, D] of one layer. `mean` [kv_heads, D] is subtracted from
    int4's keys before they are rounded. `rope_table` is that of the layer's last operator; attention
    `needs_scores` where they are more than a softmax sees (soft caps, sinks)."""

    data: Tensor
    dtype: str
    mean: Tensor | None = None
    rope_table: RopeTable | None = field(default=None, repr=False)
    needs_scores: bool = False

    def rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, kv_heads, D] as the cache holds them, float32."""
        key, value = key.float(), value.float()
        if self.mean is None:
            return as_stored(key, self.dtype), as_stored(value, self.dtype)
        return as_stored(key - self.mean, self.dtype) + self.mean, as_stored(value, self.dtype)

    def learn_mean(self, probed: RoundedCache, num_seqs: int, length: int) -> None:
        """Set `mean` from a cache that the probe has filled, one block for each of its sequences."""
        # A soft cap depends on the scores themselves, so there no mean may be subtracted.
        if not probed.needs_scores:
            keys: Any = probed.data[0, :num_seqs, :length].cpu().numpy()
            rope = probed.rope_table
            angles = (None, None) if rope is None else (rope.cos.cpu().numpy(), rope.sin.cpu().numpy())
            self.mean = torch.from_numpy(mean_key(keys, *angles)).to(self.data.device)


def as_stored(x: Tensor, dtype: str) -> Tensor:
    """Return x [..., D] float32 rounded to `dtype` and back, with scales over the last axis where it has them."""
    if dtype == "float32":
        return x
    if dtype == "fp8_e5m2":
        return x.to(torch.float8_e5m2).float()
    if dtype == "int4":
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step, least = ((high - low) / 15).bfloat16().float(), low.bfloat16().float()
        codes = torch.where(step > 0, torch.round((x - least) * (1 / step)).clamp(0, 15), 0)
        return codes * step + least
    amax = x.abs().amax(-1, keepdim=True)
    most = 127.0 if dtype == "int8" else E4M3_MOST
    inverse = torch.where(amax > 0, most / amax, 0)
    codes = (x * inverse).clamp(-most, most)
    codes = torch.round(codes) if dtype == "int8" else codes.to(torch.float8_e4m3fn).float()
    return codes * (amax / most)


def e4m3_rows(x: Tensor, inputs: Inputs) -> Tensor:
    """Return x [R, K] float32 as E4M3 times its scale (Micikevicius et al. 2022), each row by itself.

    What lies beyond the largest code times a static scale becomes the largest.
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
