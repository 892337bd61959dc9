"""Packs codes into words: the inverse of `quant.packing.unpacked`. Called by the writers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
