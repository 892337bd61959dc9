"""The mean key of each layer's heads, which an int4 cache subtracts from the keys that it stores.

Keys have channels whose numbers hardly change from token to token (KIVI, arXiv 2402.02750), so most of a code's range
would repeat the same number. Scores of a query all move by the same amount when one vector is subtracted
from all keys, which changes no softmax (SageAttention, arXiv 2410.02367, smooths its keys so). The vector depends on
the model alone: the mean over tokens drawn evenly from its vocabulary, measured once at load, so no request changes it.
Knows arrays; must not know models or requests. Called by backends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_SEQS, LENGTH = 8, 16
HORIZON_BITS = 12
"""Means are over 2^12 positions: numbers that turn faster than that have a mean of about 0, numbers that hardly turn
keep theirs for longer."""


def probe_tokens(vocab_size: int, length: int = LENGTH) -> list[list[int]]:
    """Return token ids [NUM_SEQS][length] spread evenly over the vocabulary, in an arbitrary order (Weyl)."""
    spread = [(i * 2654435761 % 2**32) * vocab_size >> 32 for i in range(1, NUM_SEQS * length + 1)]
    return [spread[i * length : (i + 1) * length] for i in range(NUM_SEQS)]


def mean_key(
    keys: NDArray[np.floating[Any]], cos: NDArray[np.float32] | None, sin: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Keys [NUM_SEQS, length, kv_heads, D] from position 0 on -> [kv_heads, D], to be subtracted from every key.

    `cos` and `sin` [positions, P] turned the first 2 * P numbers of a head. The keys are turned back before the mean is
    taken, and each pair of the mean is multiplied by the mean turn. Position 0 does not count: all positions attend to
    it, and its key is like no other. Sums are in a fixed order, so that the bits do not depend on the machine.
    """
    k = np.moveaxis(keys[:, 1:].astype(np.float64), 0, 1)  # [length - 1, NUM_SEQS, kv_heads, D]
    if cos is None or sin is None or len(cos) < 2:
        return _mean(k).astype(np.float32)
    pairs = cos.shape[1]
    angles = cos.astype(np.float64) + 1j * sin.astype(np.float64)
    rotated = k[..., :pairs] + 1j * k[..., pairs : 2 * pairs]
    mean = _mean(rotated / angles[1 : len(k) + 1, None, None])
    # The mean of 1, z, z^2, ... without a sine: each factor doubles the number of terms.
    z, share = angles[1] / angles[0], angles[0]
    for _ in range(HORIZON_BITS):
        share, z = share * (1 + z) / 2, z * z
    mean = mean * share
    return np.concatenate([mean.real, mean.imag, _mean(k[..., 2 * pairs :])], axis=1).astype(np.float32)


def _mean(x: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over the first two axes, summed entry by entry."""
    total: NDArray[Any] = np.zeros(x.shape[2:], x.dtype)
    for position in x:
        for entry in position:
            total = total + entry
    mean: NDArray[Any] = total / (x.shape[0] * x.shape[1])
    return mean
