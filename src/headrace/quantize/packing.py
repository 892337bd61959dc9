"""Packs codes into words and bytes: the inverse of `quant.packing`. Called by the writers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight
from headrace.quant.formats.mxfp4 import GROUP
from headrace.quant.packing import num_words

MAX_CODES = 2**22
"""Codes that are expanded to bits at once."""


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, count] -> int32 [rows, words]: code j is the bits from j * bits on of the row's words as one
    little-endian number."""
    count = codes.shape[1]
    words = torch.zeros(codes.shape[0], num_words(count, bits), dtype=torch.int32)
    step = max(1, MAX_CODES // count)
    for first in range(0, codes.shape[0], step):
        part = codes[first : first + step].contiguous().numpy()
        spread = np.unpackbits(part[:, :, None], axis=2, count=bits, bitorder="little").reshape(len(part), -1)
        rows = np.packbits(spread, axis=1, bitorder="little")
        words[first : first + step].view(torch.uint8).numpy()[:, : rows.shape[1]] = rows
    return words


def mxfp4_parts(weight: QWeight, name: str) -> tuple[Tensor, Tensor]:
    """Codes of E2M1 as uint8 [out, in / 2], the lower half first, and scales as uint8 [out, groups]: exponents of two,
    with a bias of 127."""
    if weight.scales is None or weight.codebook is None or weight.group != GROUP:
        raise CheckpointError(f"{name}: the format mxfp4 holds codes of E2M1 in groups of {GROUP}")
    pairs = weight.codes[:, 0::2] | weight.codes[:, 1::2] << 4
    return pairs, (torch.log2(weight.scales) + 127).to(torch.uint8)
