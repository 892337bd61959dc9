"""The determinism law through the whole Runner, for every model_type: the bits of a sequence's logits do not depend on
company, chunks, physical blocks or threads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.models.harness import Recorder, chunk_sizes, load, make_batch, random_ids, run, save_random, scattered_tables
from torch import Tensor

from headrace import models
from headrace.runner.runner import Runner
from headrace.sampling.params import SamplingParams

LENGTH, NUM_PROMPT = 150, 139
ASKS = SamplingParams(temperature=0.0, max_tokens=1000, seed=1, prompt_logprobs=0)


@pytest.fixture(scope="module", params=models.names())
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    directory = tmp_path_factory.mktemp(request.param)
    save_random(models.find(request.param).TINY, directory)
    runner = load(directory, block_size=8)
    runner.sampler = Recorder()  # type: ignore[assignment]
    return runner


def logits_of(runner: Runner, lengths: list[int], sizes: list[list[int]], seed: int, blocks: int) -> list[list[Tensor]]:
    """Logits of every position of sequences `seed`, `seed` + 1, ...: prompt rows by prompt_logprobs, others sampled.

    Step s computes the s-th chunk of each sequence; the order of the sequences in the batch turns from step to step.
    """
    tokens = [random_ids(n, runner.model.vocab_size, seed + i) for i, n in enumerate(lengths)]
    tables = scattered_tables(lengths, runner.block_size, runner.kv.shape[2], blocks)
    starts = [0] * len(lengths)
    rows: list[list[Tensor]] = [[] for _ in lengths]
    recorder = runner.sampler
    assert isinstance(recorder, Recorder)
    for step in range(max(map(len, sizes))):
        alive = [i for i in range(len(lengths)) if step < len(sizes[i])]
        alive = alive[step % len(alive) :] + alive[: step % len(alive)]
        chunks = [(i, starts[i], tokens[i][starts[i] : starts[i] + sizes[i][step]], tables[i]) for i in alive]
        prompts = [min(NUM_PROMPT, lengths[i]) for i in alive]
        nexts = {
            at: tokens[i][start + len(own)]
            for at, (i, start, own, _) in enumerate(chunks)
            if start + len(own) < prompts[at]
        }
        samples = [start + len(own) >= n for (_, start, own, _), n in zip(chunks, prompts, strict=True)]
        recorder.sampled, recorder.foretold = [], []
        batch = make_batch(
            chunks, params=[ASKS] * len(chunks), num_prompts=prompts, samples=samples, next_token_ids=nexts
        )
        result = run(runner, batch)
        sampled, foretold = iter(recorder.sampled), iter(recorder.foretold)
        for at, (i, _, own, _) in enumerate(chunks):
            rows[i] += itertools.islice(foretold, len(result.prompt_logprobs.get(at, [])))
            if samples[at]:
                rows[i].append(next(sampled))
            starts[i] += len(own)
    return rows


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    wrong = [p for p, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"positions {wrong[:5]} of {len(found)} differ"


def test_I_13_bits_through_the_runner(runner: Runner) -> None:
    runner.num_threads = 1
    decode = [1] * (LENGTH - NUM_PROMPT)
    (whole,) = logits_of(runner, [LENGTH], [[NUM_PROMPT, *decode]], 7, blocks=1)
    assert len(whole) == LENGTH
    assert not torch.equal(whole[3], whole[4])
    for chunk, blocks in ((1, 1), (7, 2), (64, 3), (NUM_PROMPT, 4)):
        sizes = chunk_sizes(NUM_PROMPT, [chunk]) + decode
        assert_bits(logits_of(runner, [LENGTH], [sizes], 7, blocks)[0], whole)
    strangers = [3, 20, 77, 149, 8, 60, 131, 1]
    for threads, seed in ((1, 5), (2, 6)):
        runner.num_threads = threads
        lengths = [LENGTH, *strangers]
        sizes = [chunk_sizes(NUM_PROMPT, [17, 1, 40]) + decode, *(chunk_sizes(n, [seed, 1, 33]) for n in strangers)]
        assert_bits(logits_of(runner, lengths, sizes, 7, blocks=seed)[0], whole)


def test_control_a_logit_that_leans_on_the_batch_is_noticed(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.model.forward
    (whole,) = logits_of(runner, [40], [[40]], 7, blocks=1)
    monkeypatch.setattr(runner.model, "forward", lambda batch, kv: real(batch, kv) * (1 + 1e-6 * len(batch.lens)))
    found, _ = logits_of(runner, [40, 9], [[40], [9]], 7, blocks=1)
    with pytest.raises(AssertionError, match="differ"):
        assert_bits(found, whole)


def test_half_precision_keeps_the_law(tmp_path: Path) -> None:
    save_random(models.find("gemma2").TINY, tmp_path)
    runner = load(tmp_path, block_size=8, dtype="bfloat16")
    runner.sampler = Recorder()  # type: ignore[assignment]
    (whole,) = logits_of(runner, [60], [[60]], 7, blocks=1)
    found, *_ = logits_of(runner, [60, 9, 30], [chunk_sizes(60, [7]), [9], [1] * 30], 7, blocks=2)
    assert_bits(found, whole)
