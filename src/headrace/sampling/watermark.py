"""The watermark: the choice of green tokens, the change of their logits, and the detection of a marked text.

Kirchenbauer et al., "A Watermark for Large Language Models", ICML 2023 (arXiv 2301.10226), algorithm 2 and equation 3.
A token is green after another if the keyed noise of (`hashing_key`, the token before, its own id) is below `gamma`:
each by itself, so that a detector reads the tokens of the text alone, whatever the width of the vocabulary. Knows no
model and no text. Called by `sampler`; `detect` is for users who hold a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.protocol.params import Watermark
from headrace.sampling import noise


class Detection(NamedTuple):
    """Evidence of a mark in a text: of `num_tokens` tokens, `num_green` are green. `z_score` is by how many standard
    deviations these are more than chance gives, `p_value` the chance of as many or more without the mark."""

    num_tokens: int
    num_green: int
    z_score: float
    p_value: float


def green_mask(mark: Watermark, previous: int, vocab_size: int) -> NDArray[np.bool_]:
    """Whether each token id below `vocab_size` is green after the token `previous`."""
    words = noise.bits_of_all(mark.hashing_key, previous, vocab_size, noise.WATERMARK)
    return words < _bar(mark)


def marked(x: NDArray[np.float32], mark: Watermark, previous: int) -> None:
    """Add `delta` to the green of the logits `x` [V], in place."""
    x[green_mask(mark, previous, len(x))] += np.float32(mark.delta)


def detect(token_ids: Sequence[int], mark: Watermark | None = None) -> Detection:
    """Look for `mark` (the default one, if None) in a text. Its first token only precedes the second.

    A repeated pair of tokens is green again, so each pair counts once. z = (g - gamma T) / sqrt(T gamma (1 -
    gamma)) of g green among T; above 4 is 1 in 30,000 unmarked texts. Raises `RequestError` for fewer than two tokens.
    """
    mark = Watermark() if mark is None else mark
    for token_id in token_ids:
        bounds.check("token_id", token_id, "token_ids")
    if len(token_ids) < 2:
        raise RequestError("token_ids", len(token_ids), "at least two tokens")
    pairs = np.unique(np.stack([np.array(token_ids[:-1], np.int64), np.array(token_ids[1:], np.int64)]), axis=1)
    total = pairs.shape[1]
    words = noise.bits_of_rows([mark.hashing_key] * total, pairs[0].tolist(), [1] * total, pairs[1], noise.WATERMARK)
    num_green = int(np.count_nonzero(words < _bar(mark)))
    z = (num_green - mark.gamma * total) / math.sqrt(total * mark.gamma * (1.0 - mark.gamma))
    return Detection(total, num_green, z, math.erfc(z / math.sqrt(2.0)) / 2.0)


def _bar(mark: Watermark) -> np.uint64:
    return np.uint64(int(mark.gamma * 2.0**64))
