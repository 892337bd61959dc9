"""Rejection sampling: which token follows, where some were drafted with known chances.

The result is distributed as the target's distribution, whatever was drafted (Leviathan et al. 2023, arXiv 2211.17192,
Appendix A; Chen et al. 2023, arXiv 2302.01318, Theorem 1; several draft tokens of one position one after the other:
Miao et al. 2024, SpecInfer, arXiv 2305.09781, Algorithm 2). The draw of a draft token, the coin that accepts it and the
draw after rejection take noise of three purposes: shared streams would bias the output. Knows distributions and noise;
called by the runner's verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.sampling import noise
from headrace.sampling.filters import F32, F64, I64


def draw(
    token_ids: I64,
    shares: F64,
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[F32 | None],
    seed: int,
    position: int,
) -> int:
    """Draw one token of the distribution `shares` [N] over `token_ids` [N] (ascending).

    Draft token i was drawn from draft_probs[i] [V], given the draft tokens before it; None: chosen without chance. The
    result is a draft token if and only if that one is accepted.
    """
    rest = np.array(shares)
    rest /= rest.sum()
    num = len(draft_token_ids)
    coins = noise.bits(seed, position, np.arange(num, dtype=np.int64), noise.ACCEPT) if num else ()
    for draft_token_id, probs, coin in zip(draft_token_ids, draft_probs, coins, strict=True):
        place = int(np.searchsorted(token_ids, draft_token_id))
        is_candidate = place < len(token_ids) and token_ids[place] == draft_token_id
        share = float(rest[place]) if is_candidate else 0.0
        draft_share = 1.0 if probs is None else float(probs[draft_token_id])
        # A uniform number in (0, 1): a certain token is always accepted, an impossible one never.
        if (int(coin) // 2**12 + 0.5) * 2.0**-52 * draft_share < share:
            return draft_token_id
        if probs is None:
            if is_candidate:
                rest[place] = 0.0
        else:
            rest = np.maximum(rest - probs[token_ids].astype(np.float64), 0.0)
        total = rest.sum()
        if total <= 0.0:
            # Only rounding can have taken everything: then the two distributions are the same.
            rest = np.array(shares)
            total = rest.sum()
        rest /= total
    return pick(token_ids, rest, seed, position, noise.RECOVER if num else noise.SAMPLE)


def pick(token_ids: I64, shares: F64, seed: int, position: int, purpose: int) -> int:
    """Draw a token of the distribution by the Gumbel-max rule with the noise of `purpose`."""
    possible = shares > 0.0
    token_ids, shares = token_ids[possible], shares[possible]
    return int(token_ids[np.argmax(np.log(shares) + noise.gumbel(noise.bits(seed, position, token_ids, purpose)))])
