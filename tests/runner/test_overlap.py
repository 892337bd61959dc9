"""Steps that overlap on a device that draws: the same outputs as one after the other, to the bit. The device is the
cuda backend's twins."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.law import make_core

from headrace.backends.cuda.drawing import Drawing
from headrace.engine.core import EngineCore
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, StepOutput

pytest.importorskip("triton")

CUDA: dict[str, Any] = {"backend": "cuda", "device": "cpu", "max_model_len": 128}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.9, "stop_token_ids": list(range(1, 2000, 8))},
]
HOST_KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.8, "min_tokens": 1, "stop_token_ids": list(range(0, 2000, 8))},
    {"temperature": 0.0, "prompt_logprobs": 0},
    {"temperature": 0.9, "structured_outputs": StructuredOutputs(regex="[a-f ]{4,12}")},
]


def make_requests(num: int, seed: int = 0, kinds: list[dict[str, Any]] = KINDS) -> list[Request]:
    rng = random.Random(seed)
    stems = [[rng.randrange(4, 500) for _ in range(40)] for _ in range(3)]
    requests = []
    for i in range(num):
        prompt = rng.choice(stems)[: rng.randint(1, 40)] + [rng.randrange(4, 500) for _ in range(rng.randint(0, 8))]
        params = SamplingParams(seed=i, max_tokens=rng.choice([1, 3, 5, 9, 12, 16]), **kinds[i % len(kinds)])
        group = f"g{i // 8}" if i % 8 < 2 else ""
        requests.append(Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params, group=group))
    return requests


class Outputs:
    """All that came out of an engine, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.reasons: dict[str, str] = {}

    def take(self, output: StepOutput) -> None:
        for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            assert name not in self.reasons, "tokens after the end"
            self.tokens.setdefault(name, []).extend(token_ids)
        for source in (output.logprobs, output.prompt_logprobs):
            for name, entries in source.items():
                self.logprobs.setdefault(name, []).extend(entries)
        self.reasons |= {name: finish.reason for name, finish in output.finished.items()}


def run(core: EngineCore, requests: list[Request], aborts: int | None = None) -> tuple[Outputs, int]:
    """Run the requests, which arrive over time; with `aborts`, end some early. Returns also the steps ahead."""
    outputs, waiting, rng, num_ahead = Outputs(), list(requests), random.Random(aborts), 0
    schedule_ahead = core.scheduler.schedule_ahead

    def counting() -> Any:
        nonlocal num_ahead
        batch = schedule_ahead()
        num_ahead += batch is not None
        return batch

    core.scheduler.schedule_ahead = counting  # type: ignore[method-assign]
    while waiting or core.has_work():
        for _ in range(min(len(waiting), rng.randint(0, 3))):
            core.add(waiting.pop(0))
        if aborts is not None and outputs.tokens and rng.random() < 0.2:
            core.abort(rng.choice(list(outputs.tokens)))
        outputs.take(core.step())
        core.scheduler.check()
    stats = core.stats()
    assert (stats.num_blocks_held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    core.close()
    return outputs, num_ahead


SIZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small pool": {"num_gpu_blocks_override": 20, "block_size": 8, "max_num_seqs": 8},
    "small steps": {"max_num_batched_tokens": 9, "max_num_seqs": 6, "block_size": 4},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 5},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kinds", [KINDS, 2 * KINDS + HOST_KINDS], ids=["device", "mixed"])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_are_those_of_one_step_after_the_other(
    size: str, kinds: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    requests = make_requests(24, kinds=kinds)
    options = CUDA | SIZES[size]
    alone, none = run(make_core(async_scheduling=False, **options), requests)
    result, num_ahead = run(make_core(**options), requests)
    assert none == 0
    assert num_ahead > 10
    assert (result.tokens, result.logprobs, result.reasons) == (alone.tokens, alone.logprobs, alone.reasons)
    assert set(alone.reasons.values()) == {"stop", "length"}
    assert not caplog.records


def test_aborts_under_a_running_step_change_no_other_output() -> None:
    requests = make_requests(24, seed=1, kinds=2 * KINDS + HOST_KINDS)
    whole, _ = run(make_core(async_scheduling=False, **CUDA), requests)
    options = CUDA | SIZES["small pool"]
    result, num_ahead = run(make_core(**options), requests, aborts=3)
    assert num_ahead > 10
    assert "abort" in result.reasons.values()
    for name, reason in result.reasons.items():
        tokens = result.tokens.get(name, [])
        if reason == "abort":
            assert whole.tokens[name][: len(tokens)] == tokens
        else:
            assert (whole.tokens[name], whole.reasons[name]) == (tokens, reason)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_token_that_the_device_can_not_tell_is_drawn_by_the_host(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it has begun at the device's guess: its row counts if that is the token, or is computed again."""
    requests = make_requests(16, seed=2)
    alone, _ = run(make_core(async_scheduling=False, **CUDA), requests)
    report, num_unsure = Drawing.report, 0

    def unsure(self: Drawing, num_rows: int, num_logits: int) -> Any:
        nonlocal num_unsure
        outcome = report(self, num_rows, num_logits)
        num_unsure += 1
        if num_unsure % 3 == 0:
            if not is_right:
                outcome[:num_logits] = (outcome[:num_logits] + 1) % 100
            outcome[2 * num_logits : 3 * num_logits] = 0
        return outcome

    monkeypatch.setattr(Drawing, "report", unsure)
    result, num_ahead = run(make_core(**CUDA), requests)
    assert num_unsure > 10
    assert num_ahead > 10
    assert (result.tokens, result.logprobs, result.reasons) == (alone.tokens, alone.logprobs, alone.reasons)


def test_ids_that_are_not_carried_on_the_device_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the gather the outputs differ."""
    requests = make_requests(8, seed=3)
    alone, _ = run(make_core(async_scheduling=False, **CUDA), requests)
    core = make_core(**CUDA)
    program: Any = core.executor.program  # type: ignore[attr-defined]
    start = program.start
    monkeypatch.setattr(program, "start", lambda chunks, rows, draws, carried: start(chunks, rows, draws, {}))
    result, _ = run(core, requests)
    assert result.tokens != alone.tokens


@pytest.mark.parametrize("where", ["start", "finish"])
def test_a_fault_of_the_device_withdraws_both_steps_and_nothing_is_lost(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(8, seed=4)
    alone, _ = run(make_core(async_scheduling=False, **CUDA), requests)
    core = make_core(**CUDA)
    outputs, real, num_calls = Outputs(), getattr(core.executor, where), 0

    def failing(argument: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise KeyboardInterrupt
        return real(argument)

    monkeypatch.setattr(core.executor, where, failing)
    for request in requests:
        core.add(request)
    while core.has_work():
        try:
            outputs.take(core.step())
        except KeyboardInterrupt:
            core.scheduler.check()
            assert core.stats().num_blocks_held == 0
    core.close()
    assert num_calls > 5
    assert (outputs.tokens, outputs.reasons) == (alone.tokens, alone.reasons)


def test_a_step_that_can_not_start_beside_another_is_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(8, seed=5)
    alone, _ = run(make_core(async_scheduling=False, **CUDA), requests)
    core = make_core(**CUDA)
    program: Any = core.executor.program  # type: ignore[attr-defined]
    start, num_calls = program.start, 0

    def failing(*parts: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise RuntimeError("planted")
        return start(*parts)

    monkeypatch.setattr(program, "start", failing)
    result, _ = run(core, requests)
    assert (result.tokens, result.logprobs, result.reasons) == (alone.tokens, alone.logprobs, alone.reasons)


def test_where_steps_do_not_overlap(tmp_path: Any) -> None:
    """On a CPU, where it is switched off, and while the schedule is recorded."""
    requests = make_requests(4)
    assert run(make_core(max_model_len=128), requests)[1] == 0
    assert run(make_core(record_schedule=str(tmp_path / "log"), **CUDA), requests)[1] == 0
    with pytest.raises(RequestError, match="async_scheduling"):
        make_core(async_scheduling=True, backend="cpu")
