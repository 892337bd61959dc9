"""temperature, min_p, top_k and top_p: what is kept, against the definitions; how often it is drawn, by chi-square."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.sampling.reference import chi_square_z, filtered, kept, ranking, sample

from headrace.protocol.params import SamplingParams
from headrace.sampling import filters, noise
from headrace.sampling.sampler import Sampler

LOGITS = st.lists(st.floats(-20, 20, width=32) | st.integers(-4, 4).map(float), min_size=1, max_size=40)
TEMPERATURES = st.sampled_from([0.05, 0.5, 0.8, 1.0, 1.7, 100.0])


def left(logits: list[float], **fields: float) -> tuple[list[int], list[float]]:
    """Token ids that the filters keep, ascending, and their probabilities."""
    params = SamplingParams(seed=0, **fields)  # type: ignore[arg-type]
    x = np.array(logits, np.float32)
    result = filtered(x, params)
    weights = np.exp(result.scaled)
    return result.token_ids.tolist(), (weights / weights.sum()).tolist()


def agrees(logits: list[float], **fields: float) -> None:
    law, closest = kept(logits, **fields)  # type: ignore[arg-type]
    assume(closest > 1e-9)
    token_ids, probabilities = left(logits, **fields)
    assert token_ids == sorted(law)
    assert probabilities == pytest.approx([law[i] for i in token_ids], rel=1e-9)


@given(LOGITS, TEMPERATURES)
def test_temperature(logits: list[float], temperature: float) -> None:
    agrees(logits, temperature=temperature)


@given(LOGITS, TEMPERATURES, st.integers(-1, 45))
def test_top_k(logits: list[float], temperature: float, top_k: int) -> None:
    agrees(logits, temperature=temperature, top_k=top_k)


@given(LOGITS, TEMPERATURES, st.floats(1e-6, 1))
def test_top_p(logits: list[float], temperature: float, top_p: float) -> None:
    agrees(logits, temperature=temperature, top_p=top_p)


@given(LOGITS, TEMPERATURES, st.floats(0, 1))
def test_min_p(logits: list[float], temperature: float, min_p: float) -> None:
    agrees(logits, temperature=temperature, min_p=min_p)


@given(LOGITS, TEMPERATURES, st.integers(-1, 45), st.floats(1e-6, 1), st.floats(0, 1))
def test_together(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    agrees(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@given(st.integers(300, 3000), st.floats(0.01, 0.999), st.integers(0, 2**32 - 1))
def test_top_p_in_a_wide_row(num: int, top_p: float, seed: int) -> None:
    agrees(np.random.default_rng(seed).normal(0, 3, num).astype(np.float32).tolist(), temperature=1.0, top_p=top_p)


def test_ties_fall_to_the_lower_token_id() -> None:
    assert left([1.0, 2.0, 2.0, 2.0], temperature=1.0, top_k=2)[0] == [1, 2]
    assert left([5.0, 5.0, 5.0, 5.0], temperature=1.0, top_p=0.5)[0] == [0, 1]
    assert left([2.0, 2.0, 1.0], temperature=1.0, top_p=1e-6)[0] == [0]


def test_order_top_p_counts_what_top_k_left() -> None:
    # 0.5 of everything needs two of four equal tokens; 0.5 of what top_k = 2 leaves needs one.
    assert left([0.0] * 4, temperature=1.0, top_p=0.5)[0] == [0, 1]
    assert left([0.0] * 4, temperature=1.0, top_p=0.5, top_k=2)[0] == [0]


def test_order_temperature_comes_before_min_p_and_top_p() -> None:
    assert left([1.0, 0.0], temperature=1.0, min_p=0.5)[0] == [0]
    assert left([1.0, 0.0], temperature=2.0, min_p=0.5)[0] == [0, 1]
    assert left([1.0, 0.0], temperature=1.0, top_p=0.7)[0] == [0]
    assert left([1.0, 0.0], temperature=2.0, top_p=0.7)[0] == [0, 1]


def test_a_tiny_temperature_is_greedy() -> None:
    assert left([1.0, 3.0, 3.0 - 1e-5], temperature=5e-324)[0] == [1]


def test_masked_tokens_are_never_kept() -> None:
    for fields in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.001}):
        assert left([0.0, -math.inf, 1.0], temperature=1.0, **fields)[0] == [0, 2]


LAWS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]
NUM_DRAWS, TOGETHER = 6000, 50
# Of 10**4 honest runs fewer than one is beyond; the seeds are fixed, so an honest run that passed once always passes.
LIMIT = 4.0


def frequency_z(logits: list[float], fields: dict[str, float]) -> float:
    """How far the draws at many positions and under four seeds are from the exact law, in deviations."""
    law, _ = kept(logits, **fields)  # type: ignore[arg-type]
    row = np.array(logits, np.float32)
    drawer = Sampler(len(logits), [])
    counts: Counter[int] = Counter()
    for seed in (0, 1, 2**32, 2**63 - 1):
        params = SamplingParams(seed=seed, **fields)  # type: ignore[arg-type]
        for first in range(0, NUM_DRAWS // 4, TOGETHER):
            rows = np.tile(row, (TOGETHER, 1))
            positions = list(range(first, first + TOGETHER))
            counts.update(sample(drawer, rows, [params] * TOGETHER, positions, [0] * TOGETHER)[0])
    return chi_square_z(counts, law)


def some_logits(num: int) -> list[float]:
    return [float(x) for x in np.random.default_rng(num).normal(0, 1.5, num).astype(np.float32)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", LAWS, ids=str)
def test_frequencies(fields: dict[str, float]) -> None:
    assert frequency_z(some_logits(24), fields) < LIMIT


def test_frequencies_over_a_wide_row() -> None:
    # 600 candidates: the path that leaves out who can not win.
    assert frequency_z(some_logits(600), {"temperature": 0.7}) < LIMIT


@pytest.mark.parametrize("scale", [0.9, 1.1])
def test_control_scaled_noise_is_caught(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    honest = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", lambda words: honest(words) * scale)
    assert frequency_z(some_logits(24), LAWS[0]) > LIMIT


def test_control_noise_that_ignores_the_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = noise.bits_of_rows

    def coarse(seeds: list[int], positions: list[int], counts: list[int], token_ids: Any) -> Any:
        return honest(seeds, [position // 8 for position in positions], counts, token_ids)

    monkeypatch.setattr(noise, "bits_of_rows", coarse)
    assert frequency_z(some_logits(24), LAWS[0]) > LIMIT


def test_control_an_unfiltered_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_nucleus", lambda x, weights, top_p: np.array(ranking(x.tolist())))
    assert frequency_z(some_logits(24), {"temperature": 1.0, "top_p": 0.8}) > LIMIT
