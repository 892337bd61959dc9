"""Filters: which token ids may be drawn, and how likely each is. They run after all edits of logits.

`Candidates` go in, fewer or cooler ones come out. Mass is counted in integers (`weights`), so a sum has no order to
depend on, and a native implementation of `select` gives the same tokens. Knows no noise but the coin passed in, no
history, no batch. Called by `sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.params import SamplingParams

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

ONE = 44
"""A weight of 1 is 2**ONE: 2**18 of them still add up in 64 bits, and less than 2**-45 counts as 0."""

_MAGIC = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to an integer, which the low bits then hold
_MAGIC_BITS = np.int64(np.float64(_MAGIC).view(np.int64))
_WHOLE = 4503599627370496.0  # 2**52
_WHOLE_BITS = np.int64(np.float64(_WHOLE).view(np.int64))
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_TAYLOR = [1.0 / math.factorial(k) for k in range(12, -1, -1)]
MIROSTAT_HEAD = 100
ADAPTIVE_SHARPNESS, ADAPTIVE_WIDTH = 10.0, 0.3


@dataclass(slots=True)
class Candidates:
    """Token ids, ascending, and their scaled logits, of which the greatest is 0. The logits themselves are greater by
    `base`.

    If the greatest sum of scaled logit and noise is below `bar`, the winner may be a token that is not among them.
    """

    token_ids: I64
    scaled: F64
    base: float
    bar: float = -math.inf

    def take(self, which: NDArray[np.bool_] | I64) -> Candidates:
        """Return the candidates of a mask or of ascending indices. If the greatest is missing, call `settled`."""
        return Candidates(self.token_ids[which], self.scaled[which], self.base)

    def settled(self) -> Candidates:
        """Return the same, with the greatest at 0 again."""
        greatest = float(self.scaled.max())
        if greatest == 0.0:
            return self
        return Candidates(self.token_ids, self.scaled - greatest, self.base + greatest)


class Cut(NamedTuple):
    """The cuts that `select` makes in a row. `floor`: least scaled logit kept. 0 in `top_k` and 1 in `top_p` keep all.

    `key` is (seed, position) of a draw right after it: tokens that cannot win may be left out then.
    """

    temperature: float = 1.0
    floor: float = -math.inf
    top_k: int = 0
    top_p: float = 1.0
    key: tuple[int, int] | None = None


Select = Callable[[list[F32], list[float], list[Cut]], list[Candidates]]
"""Applies `select` to each row, with its greatest logit and its cut."""


def select_all(rows: list[F32], greatest: list[float], cuts: list[Cut]) -> list[Candidates]:
    """Apply `select` to each row: `Select` in numpy."""
    return [select(row, most, cut) for row, most, cut in zip(rows, greatest, cuts, strict=True)]


def select(x: F32, greatest: float, cut: Cut) -> Candidates:
    """Apply temperature, min_p, top_k and top_p to the logits `x` [V], whose maximum is `greatest`.

    scaled = (x - greatest) / temperature in float64. A token is kept if that is above -inf and not below `floor`, if
    it is among the `top_k` greatest, and in the shortest head of the ranking whose weights, as a float64, reach top_p
    times the sum of the weights of all that the other filters keep. The ranking is by x, equal ones by lower id.
    """
    if 0 < cut.top_k < len(x):
        token_ids = np.sort(largest(x, cut.top_k))
        scaled = x[token_ids].astype(np.float64)
    else:
        token_ids = np.arange(len(x))
        scaled = x.astype(np.float64)
    scaled -= greatest
    # A tiny temperature sends all but the likeliest to -inf, as it should.
    with np.errstate(over="ignore"):
        scaled /= cut.temperature
    keep = scaled >= cut.floor if cut.floor > -math.inf else scaled > -math.inf
    if not keep.all():
        token_ids, scaled = token_ids[keep], scaled[keep]
    if cut.top_p < 1.0:
        places = np.sort(_nucleus(x[token_ids], weights(scaled), cut.top_p))
        token_ids, scaled = token_ids[places], scaled[places]
    return Candidates(token_ids, scaled, base_of(greatest, cut.temperature))


def base_of(greatest: float, temperature: float) -> float:
    """Return the greatest logit over the temperature; the logit itself for a tiny one, which keeps nothing else."""
    return greatest / temperature if temperature >= 1e-30 else greatest


def weights(scaled: F64) -> I64:
    """Return round(exp(scaled) * 2**ONE) for numbers up to 0, by float64 additions and products alone.

    Cody and Waite's reduction by ln 2 in two parts, then the Taylor polynomial of degree 12: within 2e-16 before the
    rounding. Written without a library's exp, and without fma, so that any language gives the same integers.
    """
    t = np.maximum(scaled, -700.0)
    z = t * _LOG2E
    z += _MAGIC
    n = z - _MAGIC
    t -= n * _LN2_HIGH
    t -= n * _LN2_LOW
    p = np.full_like(t, _TAYLOR[0])
    for factor in _TAYLOR[1:]:
        p *= t
        p += factor
    power = z.view(np.int64)
    power -= _MAGIC_BITS - np.int64(1023 + ONE)
    power <<= 52
    p *= power.view(np.float64)
    p += _WHOLE
    whole = p.view(np.int64)
    whole -= _WHOLE_BITS
    return whole


def largest(x: F32 | F64, k: int) -> I64:
    """Return the indices of the `k` greatest entries, best first, ties by lower index."""
    if k <= 0:
        return np.empty(0, np.int64)
    if k >= len(x):
        return np.argsort(-x, kind="stable")
    near = np.flatnonzero(x >= np.partition(x, len(x) - k)[len(x) - k])
    order = np.argsort(-x[near], kind="stable")[:k]
    return near[order]


def _nucleus(x: F32 | F64, mass: I64, top_p: float) -> I64:
    """Return the indices of the shortest head of the ranking by `x` that holds `top_p` of the sum of `mass`, best
    first."""
    target = top_p * float(mass.sum())
    width = min(256, len(x))
    while True:
        head = largest(x, width)
        reached = np.cumsum(mass[head]).astype(np.float64)
        if reached[-1] >= target or width == len(x):
            return head[: int(np.searchsorted(reached, target)) + 1]
        width = min(8 * width, len(x))


# -- one filter after the other


def temperature(pool: Candidates, params: SamplingParams) -> Candidates:
    """Divide by the temperature. With a `dynatemp_range` that is

    low + (high - low) * (H / log(number of candidates)) ** exponent, H being the entropy and low, high the
    temperature less and more the range, low not below 0 (llama.cpp's dynamic temperature). 0 leaves the likeliest.
    """
    warmth = params.temperature
    if params.dynatemp_range > 0.0:
        if len(pool.token_ids) < 2:
            return pool
        low, high = max(0.0, warmth - params.dynatemp_range), warmth + params.dynatemp_range
        share = min(1.0, max(0.0, _entropy(pool) / math.log(len(pool.token_ids))))
        warmth = low + (high - low) * share**params.dynatemp_exponent
    if warmth == 0.0:
        return pool.take(pool.scaled == 0.0)
    with np.errstate(over="ignore"):
        scaled = pool.scaled / warmth
    keep = scaled > -np.inf
    return Candidates(pool.token_ids[keep], scaled[keep], base_of(pool.base, warmth))


def min_p(pool: Candidates, params: SamplingParams) -> Candidates:
    """Keep the tokens of at least `min_p` times the likeliest one's probability (Nguyen et al. 2024, arXiv
    2407.01082)."""
    return pool.take(pool.scaled >= math.log(params.min_p))


def top_k(pool: Candidates, params: SamplingParams) -> Candidates:
    """Keep the `top_k` likeliest (Fan et al. 2018)."""
    return pool.take(np.sort(largest(pool.scaled, params.top_k)))


def top_p(pool: Candidates, params: SamplingParams) -> Candidates:
    """Keep the shortest head of the ranking that holds `top_p` of the mass (Holtzman et al. 2020)."""
    return pool.take(np.sort(_nucleus(pool.scaled, weights(pool.scaled), params.top_p)))


def typical_p(pool: Candidates, params: SamplingParams) -> Candidates:
    """Keep those whose surprise is nearest to the entropy, until they hold `typical_p` (Meister et al. 2023, section
    3)."""
    mass = weights(pool.scaled)
    far = np.abs(_log_sum(mass) - pool.scaled - _entropy(pool))
    # The nearest have the greatest -far; the rest is as for top_p.
    return pool.take(np.sort(_nucleus(-far, mass, params.typical_p))).settled()


def top_n_sigma(pool: Candidates, params: SamplingParams) -> Candidates:
    """Keep those within `top_n_sigma` standard deviations of the greatest logit (Tang et al. 2024, arXiv
    2411.07641)."""
    away = pool.scaled - pool.scaled.sum() / len(pool.scaled)
    deviation = math.sqrt(float((away * away).sum()) / len(away))
    return pool.take(pool.scaled >= -params.top_n_sigma * deviation)


class Filter(NamedTuple):
    """A filter by its name in `SamplingParams.samplers`. `changes`: whether it does anything, for so many tokens."""

    changes: Callable[[SamplingParams, int], bool]
    apply: Callable[[Candidates, SamplingParams], Candidates]


FILTERS = {
    "temperature": Filter(lambda params, _: params.temperature != 1.0 or params.dynatemp_range > 0.0, temperature),
    "min_p": Filter(lambda params, _: params.min_p > 0.0, min_p),
    "top_k": Filter(lambda params, vocab_size: 0 < params.top_k < vocab_size, top_k),
    "typical_p": Filter(lambda params, _: params.typical_p < 1.0, typical_p),
    "top_p": Filter(lambda params, _: params.top_p < 1.0, top_p),
    "top_n_sigma": Filter(lambda params, _: params.top_n_sigma > 0.0, top_n_sigma),
}


def xtc(pool: Candidates, params: SamplingParams, coin: float) -> Candidates:
    """Exclude top choices (p-e-w, text-generation-webui #6335): where `coin` is below `xtc_probability`, all tokens
    of at least `xtc_threshold` go, except the unlikeliest of them."""
    if coin >= params.xtc_probability:
        return pool
    mass = weights(pool.scaled)
    top = np.flatnonzero(mass >= params.xtc_threshold * float(mass.sum()))
    if len(top) < 2:
        return pool
    last = top[pool.scaled[top] == pool.scaled[top].min()][-1]
    keep = np.ones(len(mass), np.bool_)
    keep[top] = False
    keep[last] = True
    return pool.take(keep).settled()


def mirostat(pool: Candidates, params: SamplingParams, mu: float, vocab_size: int) -> Candidates:
    """Keep the tokens that mirostat allows (Basu et al. 2021, arXiv 2007.14966, algorithms 1 and 2): with version 1 the
    top k, k from a fit of Zipf's law to the hundred likeliest; with version 2 the tokens of a surprise up to `mu`
    bits."""
    if params.mirostat == 2:
        keep = surprise(pool) <= mu
        return pool.take(keep) if keep.any() else pool.take(largest(pool.scaled, 1))
    head = -np.sort(-pool.scaled)[:MIROSTAT_HEAD]
    ranks = np.arange(1, len(head))
    steps = np.log((ranks + 1) / ranks)
    slope = float((steps * (head[:-1] - head[1:])).sum() / (steps * steps).sum()) if len(head) > 1 else 1.0
    return pool.take(np.sort(largest(pool.scaled, _zipf_k(slope, mu, vocab_size, len(pool.scaled)))))


def _zipf_k(slope: float, mu: float, vocab_size: int, most: int) -> int:
    """Return ((e 2**mu) / (1 - N**-e)) ** (1 / s) with e = s - 1, held between 1 and `most`."""
    excess = slope - 1.0
    # As e goes to 0 the quotient goes to 2**mu / log N.
    head = excess / -math.expm1(-excess * math.log(vocab_size)) if abs(excess) > 1e-12 else 1.0 / math.log(vocab_size)
    if slope <= 0.0 or head <= 0.0:
        return most
    bits = (mu + math.log2(head)) / slope
    return most if bits >= 62 else max(1, min(most, int(2.0**bits)))


def adaptive_p(pool: Candidates, params: SamplingParams, mean: float) -> Candidates:
    """Make candidates likelier the nearer they are to a probability (llama.cpp #17927), a = 2 `adaptive_target` -
    `mean` held between 0 and 1. All are kept. `mean` is the running mean of the drawn tokens' probabilities.

    With d = |p - a| / 0.3 a logit becomes -10 d^2 / (1 + d): a parabola near a, a slope further off.
    """
    aim = min(1.0, max(0.0, 2.0 * params.adaptive_target - mean))
    away = np.abs(probabilities(pool) - aim) / ADAPTIVE_WIDTH
    return Candidates(pool.token_ids, -ADAPTIVE_SHARPNESS * away * away / (1.0 + away), 0.0).settled()


def probabilities(pool: Candidates) -> F64:
    """Return the probability of each candidate among them all."""
    mass = weights(pool.scaled)
    shares: F64 = mass / float(mass.sum())
    return shares


def surprise(pool: Candidates) -> F64:
    """Return -log2 of the probability of each candidate."""
    bits: F64 = (_log_sum(weights(pool.scaled)) - pool.scaled) / math.log(2.0)
    return bits


def _log_sum(mass: I64) -> float:
    return math.log(float(mass.sum()) * 2.0**-ONE)


def _entropy(pool: Candidates) -> float:
    """Return the entropy in nats: log of the sum less the mean of the scaled logits."""
    mass = weights(pool.scaled)
    near = mass > 0
    mean = float((mass[near] * pool.scaled[near]).sum()) / float(mass.sum())
    return _log_sum(mass) - mean
