"""Rejection sampling keeps the distribution: draws of each kind (10,000; 200,000 among the slow tests) against exact
probabilities, and planted faults, among them streams of noise that are shared between draft, coin and recovery."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.drafters.base import Context
from headrace.drafters.guide import SamplerGuide
from headrace.protocol.params import SamplingParams
from headrace.sampling import noise, rejection
from headrace.sampling.sampler import Row, Sampler

FEW, MANY, SEED = 10_000, 200_000, 8
WIDTH = 9
TOKEN_IDS = np.arange(WIDTH, dtype=np.int64)
TARGET = np.array([0.30, 0.22, 0.15, 0.10, 0.08, 0.06, 0.05, 0.03, 0.01])
DRAFT = np.array([0.05, 0.40, 0.05, 0.20, 0.02, 0.10, 0.03, 0.05, 0.10])


def chance_of(counts: np.ndarray, shares: np.ndarray) -> float:
    """p of a chi-square test. The degrees of freedom are even, so it is a sum."""
    expected = shares * counts.sum()
    half = float(((counts - expected) ** 2 / expected).sum()) / 2
    degrees = len(counts) - 1
    assert degrees % 2 == 0
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))


def guesses_of(kind: str, seed: int, position: int, purpose: int) -> tuple[list[int], list[np.ndarray | None]]:
    if kind == "none":
        return [], []
    if kind == "certain":
        return [position % WIDTH], [None]
    if kind == "certain siblings":
        return [1, 0, 3], [None, None, None]
    first = rejection.pick(TOKEN_IDS, DRAFT, seed, position, purpose)
    chances = DRAFT.astype(np.float32)
    if kind == "drawn":
        return [first], [chances]
    left = DRAFT.copy()
    left[first] = 0
    left /= left.sum()
    second = rejection.pick(TOKEN_IDS, left, seed + 2**40, position, purpose)
    return [first, second], [chances, left.astype(np.float32)]


def counts_of(kind: str, num: int, target: np.ndarray = TARGET, purpose: int = noise.DRAFT) -> np.ndarray:
    counts = np.zeros(WIDTH)
    for position in range(num):
        guesses, chances = guesses_of(kind, SEED, position, purpose)
        counts[rejection.draw(TOKEN_IDS, target, guesses, chances, SEED, position)] += 1
    return counts


KINDS = ["none", "certain", "certain siblings", "drawn", "drawn siblings"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_distributed_as_the_target(kind):
    assert chance_of(counts_of(kind, FEW), TARGET) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_often_is_distributed_as_the_target(kind):
    assert chance_of(counts_of(kind, MANY), TARGET) > 0.01


@pytest.mark.slow
def test_a_bias_of_two_percent_is_caught():
    biased = TARGET.copy()
    biased[0] += 0.02 * biased[0]
    biased /= biased.sum()
    assert chance_of(counts_of("drawn", MANY, biased), TARGET) < 0.01


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", ["RECOVER", "ACCEPT"])
def test_vllm_47386_shared_noise_is_caught(shared):
    """Engines have been biased so: the draft's draw and the recovery's, or the coin's, took the same numbers."""
    assert chance_of(counts_of("drawn", FEW, purpose=getattr(noise, shared)), TARGET) < 0.01


def test_recovery_without_the_guess_is_caught(monkeypatch):
    monkeypatch.setattr(rejection, "pick", lambda ids, left, *rest: PICK(ids, TARGET, *rest))
    assert chance_of(counts_of("certain siblings", FEW), TARGET) < 0.01


PICK = rejection.pick


def test_a_guess_that_can_not_be_is_never_kept():
    target = np.array([0.5, 0.5])
    for position in range(200):
        assert rejection.draw(np.array([2, 5]), target, [3], [None], 1, position) in (2, 5)


def test_a_token_is_a_guess_only_if_it_was_kept():
    """Equal distributions keep every guess; after a rejection no guess can come back."""
    for position in range(500):
        guess = rejection.pick(TOKEN_IDS, TARGET, 3, position, noise.DRAFT)
        assert rejection.draw(TOKEN_IDS, TARGET, [guess], [TARGET.astype(np.float32) * 0.999], 3, position) == guess


def through_the_samplers(num: int, target: SamplingParams, draft: SamplingParams) -> np.ndarray:
    """Counts of tokens drawn as an engine does it: the guide draws from a drafter's logits under `draft`, the target's
    sampler says under `target` what may follow."""
    sampler = Sampler(WIDTH, [])
    guide = SamplerGuide(sampler, rejects=True)
    logits, others = (np.log(shares)[None].astype(np.float32) for shares in (TARGET, DRAFT))
    counts = np.zeros(WIDTH)
    for position in range(1, num + 1):
        context = Context(0, [0] * position, 1, draft, 1, 1)
        (guess,) = guide.choose(others, [context], [[]])
        shares = guide.take_probs(0)
        (pool,) = sampler.shares(logits, [Row(target, position, 1)])
        counts[rejection.draw(*pool, [guess], [shares[0]], target.seed, position)] += 1
    return counts


def test_transformers_47932_top_k_keeps_its_distribution():
    """Both sides are filtered: with 7 of 9 tokens left, the rest never comes and the others keep their shares."""
    params = SamplingParams(temperature=1.0, top_k=7, seed=5)
    counts = through_the_samplers(2000, params, params)
    assert not counts[7:].any()
    expected = TARGET[:7] / TARGET[:7].sum()
    assert chance_of(counts[:7], expected) > 0.01
    # A drafter that filters otherwise than it says, or a target that forgets its filter, is seen.
    whole = SamplingParams(temperature=1.0, seed=5)
    assert through_the_samplers(400, whole, params)[7:].any()


def test_llama_cpp_27975_likely_tokens_are_no_likelier():
    """A guess is kept as often as the ratio says: not because the target finds it likely."""

    def generous(token_ids, shares, guesses, chances, seed, position):
        likely = [guess for guess in guesses if shares[guess] > 0.2]
        return likely[0] if likely else DRAW(token_ids, shares, guesses, chances, seed, position)

    counts = np.zeros(WIDTH)
    for position in range(FEW // 2):
        guesses, chances = guesses_of("drawn", SEED, position, noise.DRAFT)
        counts[generous(TOKEN_IDS, TARGET, guesses, chances, SEED, position)] += 1
    assert chance_of(counts, TARGET) < 0.01


DRAW = rejection.draw
