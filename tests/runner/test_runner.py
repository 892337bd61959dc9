"""The Runner as an executor, on either backend: which rows get logits, whose fault is whose, how a step is cut, copies,
prompt log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import save_random
from tests.support.steps import ASKS, GREEDY, IDS, SICK, A, B, C, batch_of, make_runner, sick
from torch import Tensor

from headrace import models
from headrace.backends import make_backend
from headrace.backends.graph import LOGITS
from headrace.backends.step import Chunks, HostLogits
from headrace.backends.torch_ref.program import EagerProgram
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import StepResult
from headrace.runner.runner import Runner
from headrace.sampling.sampler import Sampler


def poison_cache(runner: Runner, block_id: int | None = None) -> None:
    """NaN in the values of layer 1: at one position of a block, or everywhere (there in the keys, too)."""
    program: Any = runner.program
    if isinstance(program, EagerProgram):
        if block_id is None:
            for cache in program.caches:
                cache.keys[:] = cache.values[:] = math.nan
        else:
            program.caches[1].values[block_id, 2] = math.nan
        return
    if block_id is None:
        for layer in program.cache.layers:
            layer.keys[:] = layer.values[:] = math.nan
    else:
        tile, lane = divmod(block_id * runner.block_size + 2, 16)
        program.cache.layers[1].values[tile, :, lane] = math.nan


def rows_at(reads: Any, places: Any) -> list[int]:
    """The rows that lie at these places among those that are read."""
    rows: list[int] = (places if reads.is_whole else reads.rows[places]).tolist()
    return rows


def spy_on_head(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows that go through the model's head from now on, call by call; calls with none are left out."""
    seen: list[list[int]] = []
    program: Any = runner.program
    if isinstance(program, EagerProgram):
        real = program.model.logits

        def logits(hidden: Tensor, rows: Tensor) -> Tensor:
            seen.append(rows.tolist())
            return real(hidden, rows)  # type: ignore[no-any-return]

        monkeypatch.setattr(program.model, "logits", logits)
        return seen

    def told(name: str, at: int) -> Callable[..., None]:
        real = getattr(program.tape, name)

        def call(*args: Any) -> None:
            if num_rows := args[at][LOGITS]:
                seen.append(rows_at(program.reads, program.logit_rows[:num_rows]))
            real(*args)

        return call

    monkeypatch.setattr(program.tape, "run", told("run", 0))
    monkeypatch.setattr(program.tape, "run_range", told("run_range", 2))
    return seen


def test_a_step_samples_where_it_is_asked_to(runner: Runner) -> None:
    result = runner.run(batch_of((0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), samples=[True, False, True]))
    assert result.step_id == 7
    assert result.token_ids[0] >= 0
    assert result.token_ids[1] == -1
    assert result.column("logprob").keys() == {0, 2}
    assert result.column("logprob")[0].token_id == result.token_ids[0]
    assert not result.column("error")
    assert not result.column("prompt_logprobs")


def test_only_the_wanted_rows_go_through_the_head(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_head(runner, monkeypatch)
    runner.run(batch_of((0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), samples=[True, False, True]))
    runner.run(batch_of((0, IDS, A), samples=[False]))
    runner.run(batch_of((0, IDS, A), (0, IDS[:3], B), params=[GREEDY, ASKS], samples=[False, True]))
    assert seen == [[19, 29], [22], [20, 21]]


def test_an_empty_step(runner: Runner) -> None:
    assert runner.run(batch_of()) == StepResult(step_id=7, token_ids=[])


def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut(runner: Runner) -> None:
    whole = runner.run(batch_of((0, IDS, A), params=[ASKS])).column("prompt_logprobs")[0]
    assert [entry.token_id for entry in whole] == IDS[1:]
    assert all(len(entry.top) == 2 for entry in whole)
    for size in (1, 3, 7, 19):
        response = []
        for start in range(0, len(IDS), size):
            chunk_ids = IDS[start : start + size]
            last = start + len(chunk_ids) == len(IDS)
            result = runner.run(
                batch_of(
                    (start, chunk_ids, C), params=[ASKS], num_prompts=[len(IDS)], samples=[last],
                    next_token_ids={} if last else {0: IDS[start + len(chunk_ids)]},
                )
            )  # fmt: skip
            response += result.column("prompt_logprobs").get(0, [])
        assert response == whole


def test_prompt_logits_are_made_some_rows_at_a_time(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runner.run(batch_of((0, IDS, A), params=[ASKS]))
    seen = spy_on_head(runner, monkeypatch)
    monkeypatch.setattr("headrace.runner.runner.MAX_LOGITS", 8 * runner.program.vocab_size)
    assert runner.run(batch_of((0, IDS, A), params=[ASKS])) == whole
    assert seen == [[19], list(range(8)), list(range(8, 16)), [16, 17, 18]]


def test_a_row_of_the_answer_foretells_no_prompt_token(runner: Runner) -> None:
    result = runner.run(batch_of((0, IDS, A), params=[ASKS], num_prompts=[12]))
    assert [entry.token_id for entry in result.column("prompt_logprobs")[0]] == IDS[1:12]
    assert not runner.run(batch_of((12, IDS[12:], A), params=[ASKS], num_prompts=[12])).column("prompt_logprobs")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_R_17_a_numerical_fault_ends_its_own_chunk_only(
    value: float, runner: Runner, backend: str, tmp_path: Path
) -> None:
    chunks = ((0, IDS, A), (0, [*IDS[:6], SICK], B), (0, IDS[:9], C))
    before = runner.run(batch_of(chunks[0])).token_ids + runner.run(batch_of(chunks[2])).token_ids
    logprobs = [runner.run(batch_of(chunk)).column("logprob")[0] for chunk in (chunks[0], chunks[2])]
    assert not runner.run(batch_of(chunks[1])).column("error")
    result = sick(tmp_path, backend, value).run(batch_of(*chunks))
    assert result.column("error").keys() == {1}
    assert result.column("error")[1].startswith("numerical_error: ")
    assert result.token_ids == [before[0], -1, before[1]]
    assert [result.column("logprob")[0], result.column("logprob")[2]] == logprobs


def test_R_17_in_the_cache(runner: Runner) -> None:
    runner.run(batch_of((0, IDS[:8], A), (0, IDS[:8], B)))
    clean = runner.run(batch_of((8, IDS[8:9], A))).column("logprob")[0]
    poison_cache(runner, B[1])
    result = runner.run(batch_of((8, IDS[8:9], A), (8, IDS[8:9], B)))
    assert result.column("error").keys() == {1}
    assert result.column("logprob")[0] == clean


def test_R_17_in_blocks_that_are_used_again(runner: Runner) -> None:
    """What a sick sequence left in its blocks must not reach the next owner of them."""
    clean = runner.run(batch_of((0, IDS[:6], A))).column("logprob")[0]
    poison_cache(runner)
    assert runner.run(batch_of((0, IDS[:6], A))).column("logprob")[0] == clean


def test_R_17_in_a_prompt_row(backend: str, tmp_path: Path) -> None:
    result = sick(tmp_path, backend, math.nan).run(batch_of((0, [1, SICK, 2], A), (0, [1, 2], B), params=[ASKS, ASKS]))
    assert result.column("error").keys() == {0}
    assert result.column("prompt_logprobs").keys() == {1}


def test_R_17_in_the_logits_of_a_prompt_row_alone(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states and the sampled row are sound: the chunk fails all the same, and leaves no token behind."""
    right = runner.program.logits

    def logits(rows: list[int]) -> HostLogits:
        outcome = right(rows)
        return outcome._replace(finite=[row != 3 for row in rows])

    monkeypatch.setattr(runner.program, "logits", logits)
    both = batch_of((0, IDS, A), (0, IDS[:9], B), params=[ASKS, ASKS])
    result = runner.run(both)
    assert result.column("error") == {0: "numerical_error: the model's logits are not finite"}
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0
    assert result.column("prompt_logprobs").keys() == {1}


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
    assert result.column("error").keys() == {0}
    assert word in result.column("error")[0]
    assert result.token_ids == [-1, alone.token_ids[0]]
    assert result.column("logprob")[1] == alone.column("logprob")[0]


def test_a_sampling_fault_is_its_own_rows(runner: Runner) -> None:
    no_seed = SamplingParams(temperature=1.0, max_tokens=5)
    alone = runner.run(batch_of((0, IDS, A)))
    result = runner.run(batch_of((0, IDS[:4], B), (0, IDS, A), params=[no_seed, GREEDY]))
    assert result.column("error").keys() == {0}
    assert "seed" in result.column("error")[0]
    assert result.token_ids == [-1, alone.token_ids[0]]
    assert result.column("logprob").keys() == {1}


def test_a_fault_that_nobody_owns_is_raised(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(chunks: Chunks, rows: list[int]) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner.program, "forward", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.run(batch_of((0, IDS, A), (0, IDS[:7], B)))


def test_copies_come_before_writes(runner: Runner) -> None:
    """A fork at position 6 shares block 0 and copies the half-full block 1, in the step in which both go on."""
    runner.run(batch_of((0, IDS[:6], A)))
    forked = [A[0], 30, 31, 32, 33]
    result = runner.run(batch_of((6, [7], A), (6, [8], forked), copies=[(A[1], 30)]))
    for last_id, outcome in ((7, result.column("logprob")[0]), (8, result.column("logprob")[1])):
        assert runner.run(batch_of((0, [*IDS[:6], last_id], C))).column("logprob")[0] == outcome


def test_close_may_be_called_twice(runner: Runner) -> None:
    runner.close()
    runner.close()
    program: Any = runner.program
    assert not (program.caches if isinstance(program, EagerProgram) else program.cache.layers)


def test_R_25_how_torch_tells_that_memory_is_out() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(2**46)


def test_R_17_in_a_chunk_that_samples_nothing(backend: str, tmp_path: Path) -> None:
    """Its cache entries are useless, and would spoil every sequence that shares the tokens before the bad one."""
    runner = sick(tmp_path, backend, math.inf)
    result = runner.run(batch_of((0, [*IDS[:9], SICK], A), (0, IDS[:7], B), samples=[False, False]))
    assert result.column("error").keys() == {0}


def test_the_number_of_threads_reaches_the_kernels(
    directory: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        program: Any = make_runner(directory, backend, num_threads=num_threads).program
        owner, name = (program.model, "forward") if backend == "torch_ref" else (program.reads, "run")
        real = getattr(owner, name)

        def call(*args: Any, real: Callable[..., Any] = real) -> Any:
            seen.append(torch.get_num_threads() if backend == "torch_ref" else args[3])
            return real(*args)

        monkeypatch.setattr(owner, name, call)
        Runner(program, Sampler(50, [])).run(batch_of((0, IDS, A)))
        assert torch.get_num_threads() == before
    assert seen == [1, 2]


def test_a_small_model_gets_one_thread() -> None:
    backend: Any = make_backend("torch_ref", "cpu", "float32")
    assert backend.num_threads(64 * 2**20 - 1) == 1
    assert backend.num_threads(64 * 2**20) == torch.get_num_threads()


def test_a_chunk_without_its_blocks_of_a_kind_fails_alone(tmp_path: Path) -> None:
    save_random(models.find("gemma3_text").TINY, tmp_path)
    runner = make_runner(tmp_path, "cpu", max_model_len=100)
    chunks = [(0, IDS[:7], A), (0, IDS[:7], B), (0, IDS[:7], C)]
    result = runner.run(batch_of(*chunks, more_tables=[[A, B[:1], [40, *C]]]))
    assert result.column("error") == {
        1: "invalid_chunk: 1 blocks of 4 do not hold 7 positions",
        2: "invalid_chunk: block ids reach from 10 to 40, the cache has 0 to 39",
    }


def test_a_chunk_without_the_state_it_goes_on_from_fails_alone(tmp_path: Path) -> None:
    save_random(models.find("qwen3_5_text").TINY, tmp_path)
    runner = make_runner(tmp_path, "cpu", max_model_len=100)
    num_slots = runner.program.pool_sizes[-1]
    chunks = [(0, IDS[:7], A), (4, IDS[4:7], B), (4, IDS[4:7], C)]
    slots = [(6, 0), (9, 1), (12, 2)]
    result = runner.run(batch_of(*chunks, state_reads=[-1, -1, num_slots], state_writes=slots))
    text = "invalid_chunk: the state before position 4 is in slot {}, no slot of the cache"
    assert result.column("error") == {1: text.format(-1), 2: text.format(num_slots)}
