"""Rejection sampling: which token follows, where some were guessed with known chances.

The result is distributed as the target says, whatever was guessed (Leviathan et al. 2023, arXiv 2211.17192, Appendix A;
Chen et al. 2023, arXiv 2302.01318, Theorem 1; several guesses of one position one after the other: Miao et al. 2024,
SpecInfer, arXiv 2305.09781, Algorithm 2). The draw of a guess, the coin that keeps it and the draw after rejection take
noise of three purposes: streams that are shared would bias the output. Knows distributions and noise; called by the
runner's verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.sampling import noise

F64 = NDArray[np.float64]
Ids = NDArray[np.int64]


def draw(
    token_ids: Ids,
    shares: F64,
    guesses: Sequence[int],
    chances: Sequence[NDArray[np.float32] | None],
    seed: int,
    position: int,
) -> int:
    """One token of the distribution `shares` [N] over `token_ids` [N] (ascending).

    guess i was drawn with the chances[i] [V], given that the guesses before it were what they are; None: without
    chance. A token is a guess if and only if that guess was kept.
    """
    left = np.array(shares)
    left /= left.sum()
    coins = noise.bits(seed, position, np.arange(len(guesses), dtype=np.int64), noise.ACCEPT) if guesses else ()
    for guess, chance, coin in zip(guesses, chances, coins, strict=True):
        place = int(np.searchsorted(token_ids, guess))
        known = place < len(token_ids) and token_ids[place] == guess
        share = float(left[place]) if known else 0.0
        given = 1.0 if chance is None else float(chance[guess])
        # A uniform number in (0, 1): what is sure is always kept, what can not be never.
        if (int(coin) // 2**12 + 0.5) * 2.0**-52 * given < share:
            return guess
        if chance is None:
            if known:
                left[place] = 0.0
        else:
            left = np.maximum(left - chance[token_ids].astype(np.float64), 0.0)
        total = left.sum()
        if total <= 0.0:
            # Only rounding can have taken everything: then the two distributions are the same.
            left = np.array(shares)
            total = left.sum()
        left /= total
    return pick(token_ids, left, seed, position, noise.RECOVER if guesses else noise.SAMPLE)


def pick(token_ids: Ids, shares: F64, seed: int, position: int, purpose: int) -> int:
    """A token of the distribution, by the Gumbel-max rule with the noise of `purpose`."""
    some = shares > 0.0
    token_ids, shares = token_ids[some], shares[some]
    return int(token_ids[np.argmax(np.log(shares) + noise.gumbel(noise.bits(seed, position, token_ids, purpose)))])
