"""Keyed noise: a pure function from (seed, position, purpose, token id) to one Gumbel variate.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) in numpy integer
arithmetic. There is no state, so a token's noise is the same for every caller, in any order, for any number of tokens
at once. Owns the layout of key and counter (docs/adr/0013-keyed-noise.md), which native samplers must follow. Knows no
logits and no parameters; called by `sampler`, `watermark` and, to draw with the target's own noise, by drafters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

SAMPLE = 0
"""Purpose of the noise that picks a sequence's tokens. Other uses of one (seed, position) take other numbers."""

XTC = 1
"""Purpose of the coin that says whether XTC excludes top choices; it is drawn for token id 0."""

WATERMARK = 2
"""Purpose of the bits that make tokens green: the watermark's key stands for the seed, the token before for the
position."""

DRAFT = 3
"""Purpose of the noise that a drafter draws with under rejection sampling. Coupled drafters use the target's own."""

ACCEPT = 4
"""Purpose of the coins that accept draft token i of one position under rejection sampling; drawn for token id i."""

RECOVER = 5
"""Purpose of the noise that picks a token where all draft tokens of a position were rejected."""

GUMBEL_MAX = float(-np.log(-np.log1p(-(2.0**-53))))
"""The greatest variate: u is at most 1 - 2**-53."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
# Blocks computed at a time: the ten rounds then run in the processor's own caches.
_SPAN = 4096


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[int, int] | tuple[U64, U64]) -> tuple[U64, ...]:
    """Return four 32-bit words for every counter. The words of the counter and of the key are below 2**32, and
    broadcast."""
    c0, c1, c2, c3 = counter
    k0: Any = key[0]
    k1: Any = key[1]
    for _ in range(10):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> _32) ^ c1 ^ np.uint64(k0), (product0 >> _32) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _words(seed: int, position: int, blocks: U64, purpose: int) -> tuple[U64, U64]:
    """Return the 64-bit words of the even and of the odd token id of every block (token id // 2)."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    c1, c2, c3 = np.array([[position & 0xFFFFFFFF], [position >> 32], [purpose]], np.uint64)
    even, odd = np.empty((2, len(blocks)), np.uint64)
    for start in range(0, len(blocks), _SPAN):
        span = slice(start, start + _SPAN)
        w0, w1, w2, w3 = philox4x32((blocks[span], c1, c2, c3), key)
        np.bitwise_or(w0 << _32, w1, out=even[span])
        np.bitwise_or(w2 << _32, w3, out=odd[span])
    return even, odd


def bits(seed: int, position: int, token_ids: NDArray[np.int64], purpose: int = SAMPLE) -> U64:
    """Return 64 random bits for every token id, in the order of `token_ids`.

    `seed` is from 0 to 2**64 - 1, `position` the index in its sequence of the token that is drawn.
    """
    even, odd = _words(seed, position, (token_ids >> 1).astype(np.uint64), purpose)
    return np.where(token_ids & 1, odd, even)


def bits_of_rows(
    seeds: list[int], positions: list[int], counts: list[int], token_ids: NDArray[np.int64], purpose: int = SAMPLE
) -> U64:
    """Return `bits` for several (seed, position)s at once: `counts[i]` of the `token_ids`, in order, belong to the
    i-th."""
    keys = np.repeat(np.array(seeds, np.uint64), counts)
    places = np.repeat(np.array(positions, np.uint64), counts)
    counter = ((token_ids >> 1).astype(np.uint64), places & _LOW, places >> _32, np.uint64(purpose))
    w0, w1, w2, w3 = philox4x32(counter, (keys & _LOW, keys >> _32))  # type: ignore[arg-type]
    return np.where(token_ids & 1, w2 << _32 | w3, w0 << _32 | w1)


def uniform(seed: int, position: int, purpose: int) -> float:
    """Return one number in (0, 1): (top 52 bits + 1/2) / 2**52."""
    return (int(bits(seed, position, np.zeros(1, np.int64), purpose)[0]) // 2**12 + 0.5) * 2.0**-52


def bits_of_all(seed: int, position: int, num_tokens: int, purpose: int = SAMPLE) -> U64:
    """Return `bits` of the token ids 0 to num_tokens - 1, at half the cost: a block of Philox serves two token ids."""
    even, odd = _words(seed, position, np.arange((num_tokens + 1) // 2, dtype=np.uint64), purpose)
    words = np.empty(2 * len(even), np.uint64)
    words[::2], words[1::2] = even, odd
    return words[:num_tokens]


def gumbel(words: U64) -> F64:
    """Return standard Gumbel variates -log(-log(u)) with u = (top 52 bits + 1/2) / 2**52, which is never 0 nor 1."""
    u: F64 = (words >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return u
