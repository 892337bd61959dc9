"""A row's token and the bits of its log-probabilities depend on that row alone, not on the others or where it lies."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from headrace.protocol.params import SamplingParams
from headrace.protocol.step import TokenLogprob
from headrace.sampling.filters import Select, select_all
from headrace.sampling.sampler import F32, Drawn, Row, Sampler

NUM_ROWS = 40
Sample = Callable[[F32, list[Row]], list[Drawn | ValueError]]


def some_params(rng: random.Random, seed: int) -> SamplingParams:
    """Every sampler comes, most of them together with others."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.0, 1.0]),
        seed=seed,
        top_k=rng.choice([0, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.01]),
        logprobs=rng.choice([0, 5]),
        logit_bias=rng.choice([None, {3: 1.5}]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        presence_penalty=rng.choice([0.0, -0.5]),
        typical_p=rng.choice([1.0, 1.0, 0.7]),
        top_n_sigma=rng.choice([-1.0, 2.0]),
        xtc_probability=rng.choice([0.0, 0.5]),
        dry_multiplier=rng.choice([0.0, 0.8]),
        dynatemp_range=rng.choice([0.0, 0.5]),
        mirostat=rng.choice([0, 0, 0, 1, 2]),
        adaptive_target=rng.choice([-1.0, -1.0, 0.2]),
        watermark=rng.choice([None, None, True]),
        trace_decode_token_ids=rng.choice([None] * 7 + [[5] * 600]),
        no_repeat_ngram_size=rng.choice([0, 2]),
        allowed_token_ids=rng.choice([None, None, list(range(0, 60, 2))]),
        samplers=rng.choice(
            [None, None, ["top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "penalties"], ["adaptive_p"]]
        ),
    )


def workload(vocab_size: int) -> tuple[F32, list[Row]]:
    logits = (np.random.default_rng(vocab_size).normal(size=(NUM_ROWS, vocab_size)) * 4).astype(np.float32)
    rng = random.Random(1)
    rows = []
    for i in range(NUM_ROWS):
        position = rng.randrange(10, 500)
        history = [rng.randrange(20) for _ in range(position)]
        rows.append(Row(some_params(rng, i), position, 7, history, state=rng.choice([None, 6.5])))
    return logits, rows


def disagreements(sample: Sample, vocab_size: int) -> int:
    """Rows that come out differently in a batch of 40, in another order, off alignment, or far apart."""
    logits, rows = workload(vocab_size)
    expected = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(NUM_ROWS)]
    assert not [samples for samples in expected if isinstance(samples, ValueError)]
    order = list(range(NUM_ROWS))
    random.Random(2).shuffle(order)
    wide = np.zeros((NUM_ROWS, vocab_size + 3), np.float32)
    wide[:, 1:-2] = logits
    spread = np.zeros((NUM_ROWS, 2 * vocab_size), np.float32)
    spread[:, ::2] = logits
    total = 0
    for chosen in (list(range(NUM_ROWS)), order):
        for inputs in (logits[chosen], wide[chosen][:, 1:-2], spread[chosen][:, ::2]):
            samples = sample(inputs, [rows[i] for i in chosen])
            total += sum(samples[at] != expected[i] for at, i in enumerate(chosen))
    return total


@pytest.mark.parametrize("vocab_size", [61, 1001, 40007])
def test_rows_are_independent(vocab_size: int) -> None:
    assert disagreements(Sampler(vocab_size, [2]).sample_rows, vocab_size) == 0


def test_control_noise_of_one_stream_is_caught() -> None:
    generator = np.random.default_rng(0)

    def streamed(logits: F32, rows: list[Row]) -> list[Drawn | ValueError]:
        return [Drawn(int(x)) for x in (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)]

    assert disagreements(streamed, 61) > 0


def test_control_last_bits_that_know_the_row_are_caught() -> None:
    honest = Sampler(61, [2])

    def nudged(logits: F32, rows: list[Row]) -> list[Drawn | ValueError]:
        samples = honest.sample_rows(logits, rows)
        for i, each in enumerate(samples):
            assert isinstance(each, Drawn)
            entry = each.logprob
            assert entry is not None
            logprob = float(np.nextafter(entry.logprob, np.inf if i % 2 else -np.inf))
            each.logprob = TokenLogprob(entry.token_id, logprob, entry.rank, entry.top)
        return samples

    assert disagreements(nudged, 61) > 0


def test_control_a_selection_that_knows_its_place_is_caught() -> None:
    def careless(rows: list[F32], greatest: list[float], cuts: list[object]) -> object:
        result = select_all(rows, greatest, cuts)  # type: ignore[arg-type]
        return [dataclasses.replace(each, scaled=each.scaled * (1 + i % 2)) for i, each in enumerate(result)]

    select: Select = careless  # type: ignore[assignment]
    assert disagreements(Sampler(61, [2], select).sample_rows, 61) > 0


def test_prompt_logprobs_do_not_depend_on_the_chunk() -> None:
    logits, _ = workload(1001)
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
    logits, rows = workload(1001)
    sampler = Sampler(1001, [2])
    first = sampler.sample_rows(logits, rows)
    sampler.sample_rows(logits[::-1], rows)
    assert sampler.sample_rows(logits, rows) == first


def test_a_row_whose_likeliest_token_is_known_gets_the_same_token() -> None:
    """As the native top-k tells it, before bias and masks."""
    logits, rows = workload(1001)
    logits[3, 700] = logits[3].max()  # a tie
    sampler = Sampler(1001, [2])
    known = [dataclasses.replace(row, best=int(x.argmax())) for x, row in zip(logits, rows, strict=True)]
    assert sampler.sample_rows(logits, known) == sampler.sample_rows(logits, rows)
