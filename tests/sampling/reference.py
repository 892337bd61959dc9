"""Slow versions of the sampler's parts, written from their definitions, for the tests beside this file."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.params import SamplingParams
from headrace.protocol.step import TokenLogprob
from headrace.sampling.filters import Candidates, select
from headrace.sampling.sampler import Row, Sampler, _leading_cut, _stages

M32 = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers, one round at a time (Salmon et al. 2011, section 3.3 and table 2)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        rk0, rk1 = (k0 + round_index * 0x9E3779B9) & M32, (k1 + round_index * 0xBB67AE85) & M32
        c0, c1, c2, c3 = high1 ^ c1 ^ rk0, low1, high0 ^ c3 ^ rk1, low0
    return c0, c1, c2, c3


def token_bits(seed: int, position: int, token_id: int, purpose: int = 0) -> int:
    words = philox((token_id // 2, position & M32, position >> 32, purpose), (seed & M32, seed >> 32))
    high, low = words[2:] if token_id % 2 else words[:2]
    return high << 32 | low


def token_gumbel(seed: int, position: int, token_id: int) -> float:
    u = ((token_bits(seed, position, token_id) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(u))


def ranking(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def kept(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[dict[int, float], float]:
    """Probabilities of what the filters keep, and how close (relative) the nearest call of a filter was."""
    order = [i for i in ranking(logits) if logits[i] > -math.inf]
    weights = {i: Fraction(math.exp((logits[i] - logits[order[0]]) / temperature)) for i in order}
    closest = 1.0
    if min_p > 0:
        closest = min(abs(float(weights[i]) - min_p) / min_p for i in order)
        order = [i for i in order if weights[i] >= Fraction(min_p)]
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    if top_p < 1:
        before, head = Fraction(0), []
        for i in order:
            closest = min(closest, abs(float(before / total) - top_p) / top_p)
            if before >= Fraction(top_p) * total:
                break
            head.append(i)
            before += weights[i]
        order = head
    total = sum(weights[i] for i in order)
    return {i: float(weights[i] / total) for i in order}, closest


def chi_square_z(counts: dict[int, int], law: dict[int, float]) -> float:
    """Chi-square statistic of `counts` against `law` as a standard normal deviate (Wilson and Hilferty 1931).

    Outcomes expected fewer than 8 times are pooled; an outcome that the law forbids counts as infinitely bad.
    """
    if set(counts) - set(law):
        return math.inf
    num = sum(counts.values())
    cells, pooled = [], [0.0, 0.0]
    for outcome, probability in law.items():
        seen, expected = counts.get(outcome, 0), num * probability
        if expected < 8:
            pooled[0] += seen
            pooled[1] += expected
        else:
            cells.append((seen, expected))
    if pooled[1] >= 8:
        cells.append((pooled[0], pooled[1]))
    freedom = len(cells) - 1
    if freedom < 1:
        return 0.0
    chi = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    shift = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - shift)) / math.sqrt(shift))


def sample(
    sampler: Sampler,
    logits: NDArray[np.float32],
    params: list[SamplingParams],
    positions: list[int],
    num_prompts: list[int],
) -> tuple[list[int], dict[int, TokenLogprob]]:
    """Token ids of rows that need no history, and log-probabilities by row. Raises the first error."""
    rows = [Row(*each) for each in zip(params, positions, num_prompts, strict=True)]
    token_ids, logprobs = [], {}
    for i, samples in enumerate(sampler.sample_rows(logits, rows)):
        if isinstance(samples, ValueError):
            raise samples
        token_ids.append(samples.token_id)
        if samples.logprob is not None:
            logprobs[i] = samples.logprob
    return token_ids, logprobs


def sample_one(
    sampler: Sampler, row: NDArray[np.float32], params: SamplingParams, position: int, num_prompt: int
) -> int:
    return sample(sampler, row[None], [params], [position], [num_prompt])[0][0]


def filtered(x: NDArray[np.float32], params: SamplingParams) -> Candidates:
    """What `select` leaves of a row by itself, which is all that these parameters ask for."""
    cut, stages = _leading_cut(params, _stages(params, len(x)))
    assert not stages
    return select(x, float(x.max()), cut)
