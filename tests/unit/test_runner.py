"""The Runner as an executor: which rows get logits, whose fault is whose, copies, prompt log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoints import write_llama
from torch import Tensor

from headrace.backends import make_backend
from headrace.config import EngineConfig
from headrace.runner.build import build_runner
from headrace.runner.runner import Runner
from headrace.sampling.params import SamplingParams
from headrace.types import ScheduledBatch, StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=100, seed=1, logprobs=1)
ASKS = SamplingParams(temperature=0.0, max_tokens=100, seed=1, prompt_logprobs=2)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(directory: Path) -> Runner:
    return build_runner(EngineConfig(model=str(directory), num_gpu_blocks_override=40, block_size=4))[0]


def batch_of(*chunks: tuple[int, list[int], list[int]], **columns: Any) -> ScheduledBatch:
    """Chunks of (start, token ids, block table)."""
    fields: dict[str, Any] = {
        "step_id": 7,
        "seq_ids": list(range(len(chunks))),
        "starts": [start for start, _, _ in chunks],
        "lens": [len(ids) for _, ids, _ in chunks],
        "token_ids": [t for _, ids, _ in chunks for t in ids],
        "block_tables": [table for _, _, table in chunks],
        "samples": [True] * len(chunks),
        "params": [GREEDY] * len(chunks),
        "num_prompts": [start + len(ids) for start, ids, _ in chunks],
        "copies": [],
    }
    return ScheduledBatch(**(fields | columns))


A, B, C = list(range(5)), list(range(20, 25)), list(range(10, 15))


def test_a_step_samples_where_it_is_asked_to(runner: Runner) -> None:
    result = runner.run(batch_of((0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), samples=[True, False, True]))
    assert result.step_id == 7
    assert result.token_ids[0] >= 0
    assert result.token_ids[1] == -1
    assert result.logprobs.keys() == {0, 2}
    assert result.logprobs[0].token_id == result.token_ids[0]
    assert not result.errors
    assert not result.prompt_logprobs


def test_only_the_wanted_rows_go_through_the_head(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = runner.model.logits

    def logits(hidden: Tensor, rows: Tensor) -> Tensor:
        seen.append(rows.tolist())
        return real(hidden, rows)

    monkeypatch.setattr(runner.model, "logits", logits)
    runner.run(batch_of((0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), samples=[True, False, True]))
    runner.run(batch_of((0, IDS, A), samples=[False]))
    runner.run(batch_of((0, IDS, A), (0, IDS[:3], B), params=[GREEDY, ASKS], samples=[False, True]))
    assert seen == [[19, 29], [20, 21], [22]]


def test_an_empty_step(runner: Runner) -> None:
    assert runner.run(batch_of()) == StepResult(step_id=7, token_ids=[])


def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut(runner: Runner) -> None:
    whole = runner.run(batch_of((0, IDS, A), params=[ASKS])).prompt_logprobs[0]
    assert [entry.token_id for entry in whole] == IDS[1:]
    assert all(len(entry.top) == 2 for entry in whole)
    for size in (1, 3, 7, 19):
        found = []
        for start in range(0, len(IDS), size):
            own = IDS[start : start + size]
            last = start + len(own) == len(IDS)
            result = runner.run(
                batch_of(
                    (start, own, C), params=[ASKS], num_prompts=[len(IDS)], samples=[last],
                    next_token_ids={} if last else {0: IDS[start + len(own)]},
                )
            )  # fmt: skip
            found += result.prompt_logprobs.get(0, [])
        assert found == whole


def test_prompt_logits_are_made_some_rows_at_a_time(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runner.run(batch_of((0, IDS, A), params=[ASKS]))
    sizes: list[int] = []
    real = runner.model.logits

    def logits(hidden: Tensor, rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return real(hidden, rows)

    monkeypatch.setattr(runner.model, "logits", logits)
    monkeypatch.setattr("headrace.runner.runner.MAX_LOGITS", 8 * runner.model.vocab_size)
    assert runner.run(batch_of((0, IDS, A), params=[ASKS])) == whole
    assert sizes == [8, 8, 3, 1]


def test_a_row_of_the_answer_foretells_no_prompt_token(runner: Runner) -> None:
    result = runner.run(batch_of((0, IDS, A), params=[ASKS], num_prompts=[12]))
    assert [entry.token_id for entry in result.prompt_logprobs[0]] == IDS[1:12]
    assert not runner.run(batch_of((12, IDS[12:], A), params=[ASKS], num_prompts=[12])).prompt_logprobs


def poison_embedding(runner: Runner, token_id: int, value: float) -> None:
    with torch.inference_mode():
        runner.model.embedding[token_id] = value  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_R_17_a_numerical_fault_ends_its_own_chunk_only(runner: Runner, value: float) -> None:
    chunks = ((0, IDS, A), (0, [*IDS[:6], 49], B), (0, IDS[:9], C))
    before = runner.run(batch_of(chunks[0])).token_ids + runner.run(batch_of(chunks[2])).token_ids
    logprobs = [runner.run(batch_of(chunk)).logprobs[0] for chunk in (chunks[0], chunks[2])]
    poison_embedding(runner, 49, value)
    result = runner.run(batch_of(*chunks))
    assert result.errors.keys() == {1}
    assert result.errors[1].startswith("numerical_error: ")
    assert result.token_ids == [before[0], -1, before[1]]
    assert [result.logprobs[0], result.logprobs[2]] == logprobs


def test_R_17_in_the_cache(runner: Runner) -> None:
    runner.run(batch_of((0, IDS[:8], A), (0, IDS[:8], B)))
    clean = runner.run(batch_of((8, IDS[8:9], A))).logprobs[0]
    runner.kv[1, 0, B[1], 2] = float("nan")
    result = runner.run(batch_of((8, IDS[8:9], A), (8, IDS[8:9], B)))
    assert result.errors.keys() == {1}
    assert result.logprobs[0] == clean


def test_R_17_in_blocks_that_are_used_again(runner: Runner) -> None:
    """What a sick sequence left in its blocks must not reach the next owner of them."""
    clean = runner.run(batch_of((0, IDS[:6], A))).logprobs[0]
    runner.kv[:] = float("nan")
    assert runner.run(batch_of((0, IDS[:6], A))).logprobs[0] == clean


def test_R_17_in_a_prompt_row(runner: Runner) -> None:
    poison_embedding(runner, 49, float("nan"))
    result = runner.run(batch_of((0, [1, 49, 2], A), (0, [1, 2], B), params=[ASKS, ASKS]))
    assert result.errors.keys() == {0}
    assert result.prompt_logprobs.keys() == {1}


@pytest.mark.parametrize(
    ("chunk", "word"),
    [
        ((0, [1, 50], B), "token ids"),
        ((0, [-1], B), "token ids"),
        ((0, [], B), "positions"),
        ((-1, [1], B), "positions"),
        ((20, [1], B), "do not hold"),
        ((0, [1], []), "do not hold"),
        ((0, [1], [40]), "block ids"),
        ((0, [1], [-1]), "block ids"),
    ],
)
def test_a_chunk_that_makes_no_sense_ends_alone(
    chunk: tuple[int, list[int], list[int]], word: str, runner: Runner
) -> None:
    alone = runner.run(batch_of((0, IDS, A)))
    result = runner.run(batch_of(chunk, (0, IDS, A)))
    assert result.errors.keys() == {0}
    assert word in result.errors[0]
    assert result.token_ids == [-1, alone.token_ids[0]]
    assert result.logprobs[1] == alone.logprobs[0]


def test_a_sampling_fault_is_its_own_rows(runner: Runner) -> None:
    no_seed = SamplingParams(temperature=1.0, max_tokens=5)
    alone = runner.run(batch_of((0, IDS, A)))
    result = runner.run(batch_of((0, IDS[:4], B), (0, IDS, A), params=[no_seed, GREEDY]))
    assert result.errors.keys() == {0}
    assert "seed" in result.errors[0]
    assert result.token_ids == [-1, alone.token_ids[0]]
    assert result.logprobs.keys() == {1}


def test_a_fault_that_nobody_owns_is_raised(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: object, kv: object) -> Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner.model, "forward", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.run(batch_of((0, IDS, A)))


def test_copies_come_before_writes(runner: Runner) -> None:
    """A fork at position 6 shares block 0 and copies the half-full block 1, in the step in which both go on."""
    runner.run(batch_of((0, IDS[:6], A)))
    forked = [A[0], 30, 31, 32, 33]
    result = runner.run(batch_of((6, [7], A), (6, [8], forked), copies=[(A[1], 30)]))
    for own, found in ((7, result.logprobs[0]), (8, result.logprobs[1])):
        assert runner.run(batch_of((0, [*IDS[:6], own], C))).logprobs[0] == found


def test_close_may_be_called_twice(runner: Runner) -> None:
    runner.close()
    runner.close()
    assert runner.kv.numel() == 0


OUT_OF_MEMORY = [
    MemoryError("Unable to allocate 512. TiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["numpy", "torch"])
@pytest.mark.parametrize("most", [0, 8, 12, 21])
def test_R_25_out_of_memory_shrinks_the_step_and_fails_what_does_not_fit_alone(
    error: Exception, most: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [(0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), (0, IDS[:9], list(range(15, 20)))]
    whole = runner.run(batch_of(*chunks))
    real = runner.model.forward

    def forward(batch: Any, kv: Tensor) -> Tensor:
        if len(batch.token_ids) > most:
            raise error
        return real(batch, kv)

    monkeypatch.setattr(runner.model, "forward", forward)
    result = runner.run(batch_of(*chunks))
    failed = {i for i, (_, ids, _) in enumerate(chunks) if len(ids) > most}
    assert result.errors.keys() == failed
    assert all(text.startswith("out_of_memory: ") for text in result.errors.values())
    for i in range(len(chunks)):
        assert result.token_ids[i] == (-1 if i in failed else whole.token_ids[i])
        assert result.logprobs.get(i) == (None if i in failed else whole.logprobs[i])


@pytest.mark.parametrize("part", ["logits", "sample"])
def test_R_25_out_of_memory_after_the_forward_pass(part: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [(0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C)]
    params = [ASKS, GREEDY, GREEDY]
    whole = runner.run(batch_of(*chunks, params=params))
    owner: Any = runner.model if part == "logits" else runner.sampler
    real = getattr(owner, part)

    def failing(first: Tensor, second: Any, *rest: Any) -> Any:
        if len(second) > 1:
            raise MemoryError
        return real(first, second, *rest)

    monkeypatch.setattr(owner, part, failing)
    result = runner.run(batch_of(*chunks, params=params))
    assert result.errors.keys() == ({0} if part == "logits" else set())
    assert result.token_ids[1:] == whole.token_ids[1:]
    assert {i: p for i, p in result.logprobs.items() if i} == {i: p for i, p in whole.logprobs.items() if i}


def test_R_25_how_torch_tells_that_memory_is_out() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(2**46)


def test_R_17_in_a_chunk_that_samples_nothing(runner: Runner) -> None:
    """Its cache entries are of no use to anybody, and would spoil whoever shares the tokens before the bad one."""
    poison_embedding(runner, 49, float("inf"))
    result = runner.run(batch_of((0, [*IDS[:9], 49], A), (0, IDS[:7], B), samples=[False, False]))
    assert result.errors.keys() == {0}


def test_the_number_of_threads_is_the_runners_own_while_it_runs(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = runner.model.forward

    def forward(*args: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return real(*args)

    monkeypatch.setattr(runner.model, "forward", forward)
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        monkeypatch.setattr(runner, "num_threads", num_threads)
        runner.run(batch_of((0, IDS, A)))
        assert torch.get_num_threads() == before
    assert seen == [1, 2]


def test_a_small_model_gets_one_thread() -> None:
    backend = make_backend("auto", "cpu", torch.float32)
    assert backend.num_threads(64 * 2**20 - 1) == 1
    assert backend.num_threads(64 * 2**20) == torch.get_num_threads()
