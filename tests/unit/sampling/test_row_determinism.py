"""A row's token and the bits of its log-probabilities depend on that row alone, not on the others or where it lies."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import F32, Sampler
from headrace.types import TokenLogprob

NUM_ROWS = 33
Sample = Callable[..., tuple[list[int], dict[int, TokenLogprob]]]


def workload(vocab_size: int) -> tuple[F32, list[SamplingParams], list[int], list[int]]:
    logits = (np.random.default_rng(vocab_size).normal(size=(NUM_ROWS, vocab_size)) * 4).astype(np.float32)
    rng = random.Random(1)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0]),
            seed=i,
            top_k=rng.choice([0, 40]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.01]),
            logprobs=rng.choice([0, 5]),
            logit_bias=rng.choice([None, {3: 1.5}]),
        )
        for i in range(NUM_ROWS)
    ]
    return logits, params, [rng.randrange(10, 500) for _ in range(NUM_ROWS)], [7] * NUM_ROWS


def disagreements(sample: Sample, vocab_size: int) -> int:
    """Rows that come out differently in a batch of 33, in another order, off alignment, or far apart."""
    logits, params, positions, num_prompts = workload(vocab_size)
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]], [7]) for i in range(NUM_ROWS)]
    expected = [(token_ids[0], logprobs[0]) for token_ids, logprobs in alone]
    order = list(range(NUM_ROWS))
    random.Random(2).shuffle(order)
    wide = np.zeros((NUM_ROWS, vocab_size + 3), np.float32)
    wide[:, 1:-2] = logits
    spread = np.zeros((NUM_ROWS, 2 * vocab_size), np.float32)
    spread[:, ::2] = logits
    found = 0
    for rows in (list(range(NUM_ROWS)), order):
        for given in (logits[rows], wide[rows][:, 1:-2], spread[rows][:, ::2]):
            token_ids, logprobs = sample(given, [params[i] for i in rows], [positions[i] for i in rows], num_prompts)
            found += sum((token_ids[at], logprobs[at]) != expected[i] for at, i in enumerate(rows))
    return found


@pytest.mark.parametrize("vocab_size", [61, 1001, 40007])
def test_rows_are_independent(vocab_size: int) -> None:
    assert disagreements(Sampler(vocab_size, [2]).sample, vocab_size) == 0


def test_control_noise_of_one_stream_is_caught() -> None:
    generator = np.random.default_rng(0)

    def streamed(
        logits: F32, params: list[SamplingParams], positions: list[int], num_prompts: list[int]
    ) -> tuple[list[int], dict[int, TokenLogprob]]:
        token_ids = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1).tolist()
        return token_ids, {i: TokenLogprob(0, 0.0, 1, []) for i in range(len(token_ids))}

    assert disagreements(streamed, 61) > 0


def test_control_last_bits_that_know_the_row_are_caught() -> None:
    honest = Sampler(61, [2])

    def nudged(*args: object) -> tuple[list[int], dict[int, TokenLogprob]]:
        token_ids, logprobs = honest.sample(*args)  # type: ignore[arg-type]
        return token_ids, {
            i: TokenLogprob(
                entry.token_id, float(np.nextafter(entry.logprob, np.inf if i % 2 else -np.inf)), entry.rank, entry.top
            )
            for i, entry in logprobs.items()
        }

    assert disagreements(nudged, 61) > 0


def test_prompt_logprobs_do_not_depend_on_the_chunk() -> None:
    logits, _, _, _ = workload(1001)
    sampler = Sampler(1001, [])
    whole = sampler.prompt_logprobs(logits, list(range(NUM_ROWS)), 3)
    for size in (1, 7):
        pieces = [
            entry
            for start in range(0, NUM_ROWS, size)
            for entry in sampler.prompt_logprobs(
                logits[start : start + size], list(range(start, min(start + size, NUM_ROWS))), 3
            )
        ]
        assert pieces == whole


def test_the_order_of_calls_does_not_matter() -> None:
    logits, params, positions, num_prompts = workload(1001)
    sampler = Sampler(1001, [2])
    first = sampler.sample(logits, params, positions, num_prompts)
    sampler.sample(logits[::-1], params, positions, num_prompts)
    assert sampler.sample(logits, params, positions, num_prompts) == first


def test_a_row_whose_likeliest_token_is_known_gets_the_same_token() -> None:
    """As the native top-k tells it, before bias and masks."""
    logits, params, positions, num_prompts = workload(1001)
    logits[3, 700] = logits[3].max()  # a tie
    sampler = Sampler(1001, [2])
    for row, own, position, num_prompt in zip(logits, params, positions, num_prompts, strict=True):
        known = sampler.sample_row(row, own, position, num_prompt, int(row.argmax()))
        assert known == sampler.sample_row(row, own, position, num_prompt)
