"""The determinism law through the whole Runner, for every model_type, backend and form of weights and cache: the bits
of a sequence's logits do not depend on company, chunks, physical blocks or threads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.harness import (
    WITH_STATES,
    RandomModels,
    Recorder,
    chunk_sizes,
    load,
    make_batch,
    random_ids,
    run,
    scattered_tables,
)
from tests.support.refusals import load_or_skip

from headrace import models
from headrace.backends.cpu.check.verify import View
from headrace.backends.cpu.tape import Tape
from headrace.backends.step import Chunks, HostLogits, Logits, StepRows
from headrace.protocol.params import SamplingParams
from headrace.runner.runner import Runner
from headrace.sampling.sampler import F32

LENGTH, NUM_PROMPT = 150, 139
ASKS = SamplingParams(temperature=0.0, max_tokens=1000, seed=1, prompt_logprobs=0)


FORMS: dict[str, dict[str, Any]] = {
    "torch_ref": {"backend": "torch_ref"},
    "cpu": {"backend": "cpu"},
    "cpu, int4": {"backend": "cpu", "quantization": "int4"},
    "cpu, int8, cache of int8": {"backend": "cpu", "quantization": "int8", "kv_cache_dtype": "int8"},
    "cuda": {"backend": "cuda", "device": "cpu"},
    "cuda, int4, cache of fp8": {
        "backend": "cuda",
        "device": "cpu",
        "dtype": "bfloat16",
        "quantization": "int4",
        "kv_cache_dtype": "fp8_e4m3",
    },
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return RandomModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=[name for name in models.names() if name not in WITH_STATES])
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FORMS)
def runner(request: pytest.FixtureRequest, model_type: str, directories: dict[str, Path]) -> Runner:
    # tests/backends/cuda/test_types.py holds every type against torch_ref, and its refusal against what it says.
    return recorded(load_or_skip(directories[model_type], block_size=8, **FORMS[request.param]))


def recorded(runner: Runner) -> Runner:
    runner.sampler = runner._rounds.sampler = Recorder()  # type: ignore[assignment]
    return runner


def logits_of(runner: Runner, lengths: list[int], sizes: list[list[int]], seed: int, blocks: int) -> list[list[F32]]:
    """Logits of every position of sequences `seed`, `seed` + 1, ...: prompt rows by prompt_logprobs, others sampled.

    Step s computes the s-th chunk of each sequence; the order of the sequences in the batch turns from step to step.
    """
    tokens = [random_ids(n, runner.program.vocab_size, seed + i) for i, n in enumerate(lengths)]
    tables = scattered_tables(lengths, runner.block_size, runner.program.num_blocks, blocks)
    starts = [0] * len(lengths)
    rows: list[list[F32]] = [[] for _ in lengths]
    recorder = runner.sampler
    assert isinstance(recorder, Recorder)
    for step in range(max(map(len, sizes))):
        alive = [i for i in range(len(lengths)) if step < len(sizes[i])]
        alive = alive[step % len(alive) :] + alive[: step % len(alive)]
        chunks = [(i, starts[i], tokens[i][starts[i] : starts[i] + sizes[i][step]], tables[i]) for i in alive]
        prompts = [min(NUM_PROMPT, lengths[i]) for i in alive]
        nexts = {
            at: tokens[i][start + len(chunk_ids)]
            for at, (i, start, chunk_ids, _) in enumerate(chunks)
            if start + len(chunk_ids) < prompts[at]
        }
        samples = [start + len(chunk_ids) >= n for (_, start, chunk_ids, _), n in zip(chunks, prompts, strict=True)]
        recorder.sampled, recorder.foretold = [], []
        batch = make_batch(
            chunks, params=[ASKS] * len(chunks), num_prompts=prompts, samples=samples, next_token_ids=nexts
        )
        result = run(runner, batch)
        sampled, foretold = iter(recorder.sampled), iter(recorder.foretold)
        for at, (i, _, chunk_ids, _) in enumerate(chunks):
            rows[i] += itertools.islice(foretold, len(result.column("prompt_logprobs").get(at, [])))
            if samples[at]:
                rows[i].append(next(sampled))
            starts[i] += len(chunk_ids)
    return rows


def assert_bits(actual: list[F32], expected: list[F32]) -> None:
    assert len(actual) == len(expected)
    wrong = [p for p, (a, b) in enumerate(zip(actual, expected, strict=True)) if a.tobytes() != b.tobytes()]
    assert not wrong, f"positions {wrong[:5]} of {len(actual)} differ"


@pytest.mark.sampled(31)
def test_I_13_bits_through_the_runner(runner: Runner) -> None:
    program: Any = runner.program
    program.num_threads = 1
    decode = [1] * (LENGTH - NUM_PROMPT)
    (whole,) = logits_of(runner, [LENGTH], [[NUM_PROMPT, *decode]], 7, blocks=1)
    assert len(whole) == LENGTH
    assert not np.array_equal(whole[3], whole[4])
    for chunk, blocks in ((1, 1), (7, 2), (64, 3), (NUM_PROMPT, 4)):
        sizes = chunk_sizes(NUM_PROMPT, [chunk]) + decode
        assert_bits(logits_of(runner, [LENGTH], [sizes], 7, blocks)[0], whole)
    strangers = [3, 20, 77, 149, 8, 60, 131, 1]
    for threads, seed in ((1, 5), (2, 6)):
        program.num_threads = threads
        lengths = [LENGTH, *strangers]
        sizes = [chunk_sizes(NUM_PROMPT, [17, 1, 40]) + decode, *(chunk_sizes(n, [seed, 1, 33]) for n in strangers)]
        assert_bits(logits_of(runner, lengths, sizes, 7, blocks=seed)[0], whole)


@pytest.mark.sampled(16)
def test_control_a_logit_that_leans_on_the_batch_is_noticed(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = runner.program
    (whole,) = logits_of(runner, [40], [[40]], 7, blocks=1)
    real, num_chunks = program.forward, 1

    def leaning(logits: Logits) -> Logits:
        rows = np.asarray(logits.fetch()) * np.float32(1 + 1e-6 * num_chunks)
        return HostLogits(rows, logits.finite, logits.best)

    def forward(chunks: Chunks, rows: list[int]) -> tuple[list[bool], Logits]:
        nonlocal num_chunks
        num_chunks = len(chunks.starts)
        finite, logits = real(chunks, rows)
        return finite, leaning(logits)

    right = program.logits
    monkeypatch.setattr(program, "forward", forward)
    monkeypatch.setattr(program, "logits", lambda rows: leaning(right(rows)))
    result, _ = logits_of(runner, [40, 9], [[40], [9]], 7, blocks=1)
    with pytest.raises(AssertionError, match="differ"):
        assert_bits(result, whole)


@pytest.mark.parametrize(
    "form", [{"backend": "torch_ref"}, {"backend": "cpu"}, {"backend": "cpu", "quantization": "int8"}]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_the_law(form: dict[str, str], dtype: str, directories: dict[str, Path]) -> None:
    runner = recorded(load(directories["gemma2"], block_size=8, dtype=dtype, **form))
    (whole,) = logits_of(runner, [60], [[60]], 7, blocks=1)
    result, *_ = logits_of(runner, [60, 9, 30], [chunk_sizes(60, [7]), [9], [1] * 30], 7, blocks=2)
    assert_bits(result, whole)


def company_differs(runner: Runner) -> bool:
    """Whether 40 positions in one piece alone and in pieces among strangers come out differently."""
    (whole,) = logits_of(runner, [40], [[40]], 7, blocks=1)
    result, *_ = logits_of(runner, [40, 9, 30], [chunk_sizes(40, [7]), [9], [11] * 2 + [8]], 7, blocks=2)
    return any(a.tobytes() != b.tobytes() for a, b in zip(result, whole, strict=True))


@pytest.fixture(params=["int4", "int8"])
def quantised(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Runner:
    runner = recorded(load(directories["qwen3"], block_size=8, backend="cpu", quantization=request.param))
    assert not company_differs(runner)
    return runner


def test_control_activations_quantised_by_the_whole_batch_are_noticed(
    quantised: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every record that writes codes, they are written once more with one scale for all rows."""

    spoils = False

    def run(tape: Tape, dims: list[int], num_threads: int = 0) -> None:
        for node in tape.nodes:
            tape.run_range(node.index, node.index + 1, dims, num_threads)
            if spoils and dims[node.dim] and node.fields.get("q") is not None and not node.op.startswith("linear"):
                scale_by_batch(View(tape, node, dims[node.dim], dims))

    monkeypatch.setattr(Tape, "run", run)
    assert not company_differs(quantised)
    spoils = True
    assert company_differs(quantised)


def scale_by_batch(view: View) -> None:
    codes = view.array("q", np.int8, view.num_rows, view["ld_q"])
    scales = view.array("scales", np.float32, view.num_rows, view["ld_s"])
    sums = view.array("sums", np.int32, view.num_rows, view["ld_s"])
    width = min(codes.shape[1], scales.shape[1] * view["group"])
    values = codes[:, :width] * np.repeat(scales, view["group"], axis=1)[:, :width]
    scales[:] = scales.max(axis=0)
    with np.errstate(invalid="ignore"):
        codes[:, :width] = np.nan_to_num(np.rint(values / np.repeat(scales, view["group"], axis=1)[:, :width]))
    padded = np.pad(codes[:, :width].astype(np.int32), ((0, 0), (0, scales.shape[1] * view["group"] - width)))
    sums[:] = padded.reshape(len(codes), -1, view["group"]).sum(axis=2)


@pytest.mark.parametrize("part", ["start", "positions"])
def test_control_a_row_that_is_placed_by_its_chunk_is_noticed(
    part: str, quantised: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention from one position too few where a chunk goes on; rotary angles that begin elsewhere among others, which
    changes nothing but the last bits."""
    right = StepRows.fill

    def fill(inputs: StepRows, chunks: Chunks) -> int:
        num_rows = right(inputs, chunks)
        if part == "positions" and len(chunks.starts) > 1:
            inputs.positions[:num_rows] += 1
        for i, start in enumerate(chunks.starts if part == "start" else []):
            inputs.start[i] -= start > 0
        return num_rows

    monkeypatch.setattr(StepRows, "fill", fill)
    assert company_differs(quantised)
