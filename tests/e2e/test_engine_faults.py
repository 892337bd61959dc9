"""Faults of the executor under the real engine: what a failing step may do to requests and to the engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import llama_tensors, write_llama

from headrace import LLM
from headrace.backends.step import Chunks
from headrace.engine import build
from headrace.engine.core import EngineCore, Ticket
from headrace.grammar.matchers import GrammarError
from headrace.protocol.config import EngineConfig
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, ScheduledBatch

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=1)


SICK = 49


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["cpu", "torch_ref"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(directory: Path, backend: str = "auto", **options: Any) -> EngineCore:
    fields: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "backend": backend} | options
    return build.build_engine(EngineConfig(model=str(directory), **fields))


def sick_engine(directory: Path, backend: str, value: float, token_id: int | None, **options: Any) -> EngineCore:
    """The same model, with `value` for the embedding of one token or of all."""
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"][slice(None) if token_id is None else token_id] = value
    return engine(write_llama(directory, tensors), backend, **options)


def ask(name: str, prompt: list[int] = PROMPT, **fields: Any) -> Request:
    return Request(**{"request_id": name, "prompt_token_ids": prompt, "params": GREEDY, **fields})


def drain(core: EngineCore) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Tokens with their log-probabilities, and finish reasons, of all that ends from here on."""
    result: dict[str, list[Any]] = {}
    reasons: dict[str, str] = {}
    while core.has_work():
        output = core.step()
        core.scheduler.check()
        for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            result.setdefault(name, []).append((token_ids, output.logprobs[name]))
        reasons.update({name: finish.reason for name, finish in output.finished.items()})
    assert core.stats().num_blocks_held == 0
    return result, reasons


def fail_at(core: EngineCore, steps: set[int], error: BaseException) -> None:
    right, turn = core.executor.start, 0

    def start(batch: ScheduledBatch) -> Ticket:
        nonlocal turn
        turn += 1
        if turn in steps:
            raise error
        return right(batch)

    core.executor.start = start  # type: ignore[method-assign]


@pytest.mark.parametrize("step", range(1, 7))
def test_a_step_that_failed_has_not_happened(step: int, directory: Path, backend: str) -> None:
    """Siblings share blocks by a copy that belongs to the step: a lost copy would be seen in the tokens."""
    core = engine(directory, backend, max_num_batched_tokens=9)
    for name in ("a", "b", "c"):
        core.add(ask(name, group="g", params=GREEDY))
    expected, _ = drain(core)
    core.close()
    core = engine(directory, backend, max_num_batched_tokens=9)
    fail_at(core, {step}, RuntimeError("the device is gone"))
    for name in ("a", "b", "c"):
        core.add(ask(name, group="g", params=GREEDY))
    actual: dict[str, list[Any]] = {}
    for _ in range(step - 1):
        output = core.step()
        for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            actual.setdefault(name, []).append((token_ids, output.logprobs[name]))
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    core.scheduler.check()
    assert core.stats().num_blocks_held == 0
    rest, reasons = drain(core)
    assert {name: actual.get(name, []) + rest.get(name, []) for name in expected} == expected
    assert set(reasons.values()) == {"length"}
    core.close()


def test_requests_aborted_during_a_step_that_fails_end_as_aborted(directory: Path) -> None:
    core = engine(directory)

    def start(batch: ScheduledBatch) -> Ticket:
        core.abort("a")
        raise MemoryError

    right, core.executor.start = core.executor.start, start  # type: ignore[method-assign]
    core.add(ask("a"))
    core.add(ask("b"))
    with pytest.raises(MemoryError):
        core.step()
    core.scheduler.check()
    core.executor.start = right  # type: ignore[method-assign]
    assert drain(core)[1] == {"a": "abort", "b": "length"}
    core.close()


def test_an_interrupted_llm_says_so_and_goes_on(directory: Path) -> None:
    """Ctrl-C in a notebook: the caller sees KeyboardInterrupt, nothing is left behind, the next call works."""
    llm = LLM(str(directory), num_gpu_blocks_override=64, block_size=4, skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": PROMPT[:n]} for n in (20, 7, 3)]
    token_ids = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    llm.reset_prefix_cache()
    fail_at(llm.core, {3}, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.get_metrics().num_blocks_held == 0
    assert llm.get_metrics().num_running == llm.get_metrics().num_waiting == 0
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == token_ids
    llm.close()


def test_streams_and_calls_of_one_llm_may_be_interleaved(directory: Path) -> None:
    """A step serves everybody: the tokens that one call's steps give to another's request must reach it."""
    llm = LLM(str(directory), num_gpu_blocks_override=64, block_size=4, skip_tokenizer_init=True)
    requests = [{"prompt_token_ids": PROMPT[:n]} for n in (20, 7, 3, 1)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in requests]
    first, second, third = (llm.stream(prompt, GREEDY) for prompt in requests[:3])
    next(first)
    next(second)
    next(third)
    third.close()
    next(second)
    assert llm.generate(requests[3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone[3]
    for stream, expected in ((first, alone[0]), (second, alone[1])):
        *_, last = stream
        assert last.finished
        assert last.outputs[0].token_ids == expected
    assert llm.get_metrics().num_blocks_held == llm.get_metrics().num_running == 0
    llm.close()


def test_R_17_what_a_sick_request_computed_reaches_nobody(directory: Path, backend: str, tmp_path: Path) -> None:
    """The sick token comes 3 after a whole block, in a chunk that samples nothing. In the same chunk, it spoils the
    cache entries of the tokens before it; others who share those must not find them."""
    core = engine(directory, backend, max_num_batched_tokens=12)
    core.add(ask("clean"))
    clean = drain(core)[0]["clean"]
    core.close()
    core = sick_engine(tmp_path, backend, math.nan, SICK, max_num_batched_tokens=12)
    core.add(ask("sick", [*PROMPT[:7], SICK, *PROMPT[8:]]))
    assert drain(core) == ({}, {"sick": "error"})
    core.add(ask("clean"))
    actual, reasons = drain(core)
    assert reasons == {"clean": "length"}
    assert actual["clean"] == clean
    core.close()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_R_17_a_model_that_is_sick_all_over_fails_requests_and_lives(
    value: float, backend: str, tmp_path: Path
) -> None:
    core = sick_engine(tmp_path, backend, value, None)
    for name in ("a", "b", "c"):
        core.add(ask(name))
    assert drain(core) == ({}, {"a": "error", "b": "error", "c": "error"})
    assert core.stats().num_blocks_cached == 0
    core.close()


@pytest.mark.parametrize("most", [1, 5, 20, 30])
def test_R_25_memory_errors_in_a_step_end_only_what_never_fits(
    most: int, directory: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {"a": PROMPT, "b": PROMPT[:5], "c": [9, 9], "d": [7]}
    core = engine(directory, backend)
    for name, prompt in prompts.items():
        core.add(ask(name, prompt))
    expected, _ = drain(core)
    core.reset_prefix_cache()
    program: Any = core.executor.program  # type: ignore[attr-defined]
    real = program.forward

    def forward(chunks: Chunks, rows: list[int]) -> Any:
        if sum(map(len, chunks.token_ids)) > most:
            raise MemoryError
        return real(chunks, rows)

    monkeypatch.setattr(program, "forward", forward)
    for name, prompt in prompts.items():
        core.add(ask(name, prompt))
    actual, reasons = drain(core)
    assert reasons == {name: "length" if len(prompt) <= most else "error" for name, prompt in prompts.items()}
    assert actual == {name: expected[name] for name, prompt in prompts.items() if len(prompt) <= most}
    core.close()


class PanicException(BaseException):
    """The name of what a panic in a library written in Rust becomes; it is no Exception."""


def spoil(core: EngineCore, monkeypatch: pytest.MonkeyPatch, sick: set[int], error: BaseException) -> None:
    """Make the sampler raise for requests of certain seeds."""
    sampler: Any = core.executor.sampler  # type: ignore[attr-defined]
    real = sampler.sample_rows

    def sample_rows(numbers: Any, rows: list[Any]) -> Any:
        if any(row.params.seed in sick for row in rows):
            raise error
        return real(numbers, rows)

    monkeypatch.setattr(sampler, "sample_rows", sample_rows)


SEEDS = range(7)


def seeded(seed: int) -> Request:
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=6, ignore_eos=True, logprobs=1)
    return ask(str(seed), [*PROMPT, seed], params=params)


@pytest.mark.parametrize("error", [IndexError("out of range"), RuntimeError("bad"), PanicException("explicit panic")])
@pytest.mark.parametrize("sick", [{0}, {3, 6}])
def test_R_17_an_exception_ends_whose_it_is_and_nobody_else(
    sick: set[int], error: BaseException, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(directory)
    for seed in SEEDS:
        core.add(seeded(seed))
    expected, _ = drain(core)
    core.reset_prefix_cache()
    spoil(core, monkeypatch, sick, error)
    for seed in SEEDS:
        core.add(seeded(seed))
    actual, reasons = drain(core)
    assert reasons == {str(seed): "error" if seed in sick else "length" for seed in SEEDS}
    assert actual == {str(seed): expected[str(seed)] for seed in SEEDS if seed not in sick}
    core.close()


def test_R_17_what_the_failing_request_had_computed_is_not_published(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(directory, max_num_batched_tokens=32)
    spoil(core, monkeypatch, {0}, IndexError())
    core.add(seeded(0))
    assert drain(core)[1] == {"0": "error"}
    assert core.stats().num_blocks_cached == 0
    core.close()


def test_an_exception_that_all_run_into_has_no_owner(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is the engine's, and its caller gets the error: at once, or when single requests fail in a row."""
    core = engine(directory)
    spoil(core, monkeypatch, set(SEEDS), RuntimeError("the device is gone"))
    core.add(seeded(0))
    core.add(seeded(1))
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    for seed in (0, 1):
        core.abort(str(seed))
    drain(core)
    for seed in (2, 3):
        core.add(seeded(seed))
        assert drain(core)[1] == {str(seed): "error"}
    core.add(seeded(4))
    with pytest.raises(RuntimeError, match="the device is gone"):
        drain(core)
    core.close()


def test_control_a_runner_that_blames_everybody_is_noticed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.runner import faults

    monkeypatch.setattr(faults.StepFaults, "reason", lambda self, error, num_rows: "")
    core = engine(directory)
    spoil(core, monkeypatch, {3}, IndexError())
    for seed in SEEDS:
        core.add(seeded(seed))
    with pytest.raises(IndexError):
        drain(core)
    core.close()


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        OSError(24, "too many open files"),
        ImportError("no memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_what_comes_from_outside_is_nobodys_fault(
    error: BaseException, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(directory)
    spoil(core, monkeypatch, {0}, error)
    core.add(seeded(0))
    core.add(seeded(1))
    with pytest.raises(type(error)):
        core.step()
    core.close()


@pytest.mark.parametrize("names", ["abc", "c"])
def test_R_25_a_shortage_that_leaves_no_room_for_one_row_is_nobodys_fault(
    names: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that can not compute a single row has to be replaced; no request is failed for it, nor a sole one."""
    core = engine(directory)
    prompts = {name: {"a": PROMPT, "b": PROMPT[:5], "c": [9, 9]}[name] for name in names}
    for name, prompt in prompts.items():
        core.add(ask(name, prompt))
    expected, _ = drain(core)
    core.reset_prefix_cache()
    for name, prompt in prompts.items():
        core.add(ask(name, prompt))
    actual = {name: [(core_out, logprobs)] for name, core_out, logprobs in told(core.step())}
    program: Any = core.executor.program  # type: ignore[attr-defined]
    real = program.forward

    def forward(chunks: Chunks, rows: list[int]) -> Any:
        raise MemoryError

    monkeypatch.setattr(program, "forward", forward)
    with pytest.raises(MemoryError):
        core.step()
    monkeypatch.setattr(program, "forward", real)
    rest, reasons = drain(core)
    assert {name: actual[name] + rest[name] for name in expected} == expected
    assert set(reasons.values()) == {"length"}
    core.close()


class Stubborn:
    """Matchers that fail for one sequence; all others may say anything."""

    def __init__(self, words: int, sick: list[int], error: BaseException) -> None:
        self.mask_of_all = np.full(words, 0xFFFFFFFF, np.uint32)
        self.sick = sick
        self.error = error

    def begin(self, expected: Any) -> None:
        pass

    def wait(self, seq_ids: list[int], others: bool) -> set[int]:
        return set()

    def mask(self, seq_id: int, constraint: Any, tokens: list[int]) -> Any:
        if seq_id in self.sick and len(tokens) >= 2:
            raise self.error
        return self.mask_of_all

    def accept(self, seq_id: int, token_id: int, params: SamplingParams, num_generated: int) -> list[int]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GrammarError("the constraint allows no token here"), "structured_output_error"),
        (IndexError("of the grammars' library"), "internal_error"),
        (PanicException("explicit panic"), "internal_error"),
    ],
)
def test_R_20_a_grammar_that_fails_ends_its_own_request(error: BaseException, code: str, directory: Path) -> None:
    core = engine(directory)
    prompts = {name: [*PROMPT, place] for place, name in enumerate("abc")}
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, logprobs=1,
        structured_outputs=StructuredOutputs(regex=".*"),
    )  # fmt: skip

    def all_of(sick: list[int]) -> tuple[dict[str, list[Any]], dict[str, str]]:
        runner: Any = core.executor
        runner.matchers = runner._rounds.matchers = Stubborn(-(-core.info.vocab_size // 32), sick, error)
        for name, prompt in prompts.items():
            core.add(ask(name, prompt, params=params))
        messages: dict[str, str] = {}
        actual: dict[str, list[Any]] = {}
        while core.has_work():
            output = core.step()
            for name, token_ids, logprobs in told(output):
                actual.setdefault(name, []).append((token_ids, logprobs))
            messages.update({name: finish.message.partition(":")[0] for name, finish in output.finished.items()})
        core.reset_prefix_cache()
        return actual, messages

    expected, messages = all_of([])
    assert set(messages.values()) == {""}
    # Sequences are numbered as they come: this is the second of the next three.
    actual, messages = all_of([5])
    assert messages == {"a": "", "b": code, "c": ""}
    assert {name: actual[name] for name in "ac"} == {name: expected[name] for name in "ac"}
    assert actual["b"] == expected["b"][:2]
    core.close()


def told(output: Any) -> list[tuple[str, list[int], Any]]:
    return [(n, ids, output.logprobs[n]) for n, ids in zip(output.request_ids, output.token_ids, strict=True)]
