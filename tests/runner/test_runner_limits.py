"""The Runner within limits, on either backend: cut steps, and memory that runs out. The results are the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.steps import ASKS, GREEDY, IDS, SICK, A, B, C, batch_of, sick

from headrace.backends.step import Chunks
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import PLAIN, ScheduledBatch
from headrace.runner.runner import Runner

OUT_OF_MEMORY = [
    (MemoryError, "Unable to allocate 512. TiB"),
    (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


def limit_rows(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, most: int, error: type[Exception], text: str = ""
) -> None:
    """Memory runs out in the forward pass where there are more rows."""
    real = runner.program.forward

    def forward(chunks: Chunks, rows: list[int]) -> Any:
        if sum(map(len, chunks.token_ids)) > most:
            raise error(text)
        return real(chunks, rows)

    monkeypatch.setattr(runner.program, "forward", forward)


@pytest.mark.parametrize(("error", "text"), OUT_OF_MEMORY, ids=["numpy", "torch"])
@pytest.mark.parametrize("most", [8, 12, 21])
def test_R_25_out_of_memory_shrinks_the_step_and_fails_what_does_not_fit_alone(
    error: type[Exception], text: str, most: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [(0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), (0, IDS[:9], list(range(15, 20)))]
    params = [GREEDY, ASKS, GREEDY, ASKS]
    whole = runner.run(batch_of(*chunks, params=params))
    limit_rows(runner, monkeypatch, most, error, text)
    result = runner.run(batch_of(*chunks, params=params))
    failed = {i for i, (_, ids, _) in enumerate(chunks) if len(ids) > most}
    assert result.column("error").keys() == failed
    assert all(value.startswith("out_of_memory: ") for value in result.column("error").values())
    for i in range(len(chunks)):
        assert result.token_ids[i] == (-1 if i in failed else whole.token_ids[i])
        row = PLAIN if i in failed else whole.read(i)
        assert (result.read(i).logprob, result.read(i).prompt_logprobs) == (row.logprob, row.prompt_logprobs)


@pytest.mark.parametrize(("error", "text"), OUT_OF_MEMORY, ids=["numpy", "torch"])
def test_R_25_a_shortage_that_all_run_into_is_the_engines(
    error: type[Exception], text: str, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_rows(runner, monkeypatch, 0, error, text)
    with pytest.raises(MemoryError):
        runner.run(batch_of((0, IDS, A), (0, IDS[:7], B)))


@pytest.mark.parametrize("part", ["logits", "foretell", "sample"])
def test_R_25_out_of_memory_after_the_forward_pass(part: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the work of a step was done in part, it is done again, and counts once."""
    chunks = [(0, IDS, A), (0, IDS[:7], B), (0, IDS[:2], C), (0, IDS[:5], list(range(15, 20)))]
    params = [ASKS, GREEDY, ASKS, GREEDY]
    whole = runner.run(batch_of(*chunks, params=params))
    owner: Any = runner.sampler if part != "logits" else runner.program
    name, calls = {"logits": "logits", "foretell": "prompt_logprobs", "sample": "_open"}[part], 0
    real = getattr(owner, name)

    def failing(first: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        # More than one row; or in the middle of the first step.
        if len(first) > 1 if part != "sample" else calls == 2:
            raise MemoryError
        return real(first, *rest)

    monkeypatch.setattr(owner, name, failing)
    result = runner.run(batch_of(*chunks, params=params))
    failed = {0} if part != "sample" else set()
    assert result.column("error").keys() == failed
    for i in range(len(chunks)):
        assert result.token_ids[i] == (-1 if i in failed else whole.token_ids[i])
        row = PLAIN if i in failed else whole.read(i)
        assert (result.read(i).logprob, result.read(i).prompt_logprobs) == (row.logprob, row.prompt_logprobs)


def test_R_25_prompt_logprobs_that_were_made_before_memory_ran_out_count_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = batch_of((0, IDS[:7], A), (0, IDS, B), params=[ASKS, ASKS])
    whole = runner.run(both)
    real, calls = runner.sampler.prompt_logprobs, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(runner.sampler, "prompt_logprobs", failing)
    assert runner.run(both) == whole


def busy_step() -> ScheduledBatch:
    """Chunks of all kinds: long, going on, of one row, sick, senseless; sampled, foretold, both, neither."""
    seeded = SamplingParams(temperature=0.9, max_tokens=100, seed=5, logprobs=3, prompt_logprobs=1, top_p=0.8)
    no_seed = SamplingParams(temperature=1.0, max_tokens=5)
    chunks = [
        (0, IDS, A, GREEDY, True),
        (0, [*IDS[:6], SICK, *IDS[6:9]], B, ASKS, True),
        (0, [], [], GREEDY, True),
        (0, IDS[:13], C, ASKS, False),
        (8, IDS[8:9], [30, 31, 32], GREEDY, True),
        (0, IDS[:3], [33], seeded, True),
        (0, IDS[:11], [34, 35, 36], no_seed, True),
        (0, [SICK], [37], GREEDY, False),
        (4, IDS[4:15], [30, 31, 38, 39], seeded, True),
    ]  # fmt: skip
    return batch_of(
        *(chunk[:3] for chunk in chunks),
        params=[chunk[3] for chunk in chunks],
        samples=[chunk[4] for chunk in chunks],
        num_prompts=[len(IDS)] * len(chunks),
        next_token_ids={1: 8, 3: 7, 5: 1, 8: 3},
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 19, 20, 21, 45])
@pytest.mark.parametrize("most_logits", [1, 2, 100])
def test_I_13_a_step_that_is_cut_gives_what_the_whole_one_gives(
    most: int, most_logits: int, backend: str, tmp_path: Path
) -> None:
    whole_runner, runner = sick(tmp_path, backend, math.nan), sick(tmp_path, backend, math.nan)
    runner.program.max_rows, runner.program.max_logits = most, most_logits
    sizes: list[int] = []
    real = runner.program.forward

    def forward(chunks: Chunks, rows: list[int]) -> Any:
        sizes.append(sum(map(len, chunks.token_ids)))
        assert sizes[-1] <= most
        assert len(rows) <= most_logits
        return real(chunks, rows)

    runner.program.forward = forward  # type: ignore[method-assign]
    for each in (whole_runner, runner):
        each.run(batch_of((0, IDS[:8], [30, 31])))
    whole, result = whole_runner.run(busy_step()), runner.run(busy_step())
    assert len(sizes) > 45 // most
    assert result == whole
    assert {i: text.split(":")[0] for i, text in whole.column("error").items()} == {
        1: "numerical_error", 2: "invalid_chunk", 6: "sampling_error", 7: "numerical_error"
    }  # fmt: skip
    assert {i: len(entries) for i, entries in whole.column("prompt_logprobs").items()} == {3: 13, 5: 3, 8: 11}
    assert whole.column("logprob").keys() == {0, 4, 5, 8}


def test_R_25_memory_runs_out_in_a_step_that_is_cut(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for 4 rows: pieces of 3 fit alone, so that nothing fails; whole, what is longer does, and nothing else."""
    runner = sick(tmp_path, backend, math.nan)
    runner.run(batch_of((0, IDS[:8], [30, 31])))
    step = busy_step()
    whole, most = runner.run(step), runner.program.max_rows
    limit_rows(runner, monkeypatch, 4, MemoryError)
    runner.program.max_rows = 3
    assert runner.run(step) == whole
    runner.program.max_rows = most
    result = runner.run(step)
    for i, length in enumerate(step.lens):
        if length > 4:
            assert result.column("error")[i].startswith("out_of_memory")
            assert result.token_ids[i] == -1
            assert i not in result.column("logprob").keys() | result.column("prompt_logprobs").keys()
        else:
            assert (result.token_ids[i], result.read(i)) == (whole.token_ids[i], whole.read(i))


def test_control_a_cut_that_loses_a_token_is_noticed(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token after a piece of a chunk, taken from where the whole chunk would have it."""
    runner = sick(tmp_path, backend, math.nan)
    runner.run(batch_of((0, IDS[:8], [30, 31])))
    whole = runner.run(busy_step())
    runner.program.max_rows = 5
    monkeypatch.setattr(Runner, "_token_after", lambda self, batch, piece: batch.next_token_ids[piece.chunk_id])
    assert runner.run(busy_step()) != whole
