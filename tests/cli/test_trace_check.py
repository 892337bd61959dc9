"""`headrace simulate --check`: on an engine whose steps take exactly what the model says, the simulation's figures are
those of the replay, also with a cache that thrashes; and the command on a small slice."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import fake
from tests.support.shallow import shallow

from headrace.cli import checking, planning, trace_check
from headrace.cli.main import main
from headrace.engine.core import EngineCore, Ticket
from headrace.fleet.traces import Call
from headrace.plan import hardware
from headrace.protocol import step_model
from headrace.protocol.config import EngineConfig
from headrace.protocol.step import ScheduledBatch, StepResult
from headrace.protocol.step_model import StepModel

MODEL = StepModel(base=0.01, knots=(1,), slopes=(0.001,), logits=0.002, seen=1e-6)
CONFIG = EngineConfig(max_model_len=1600, max_num_seqs=6, max_num_batched_tokens=256)


class Clocked:
    """An executor whose steps take what a model of their times says, on a clock of its own."""

    def __init__(self, core: EngineCore, model: StepModel) -> None:
        self.inner: Any = core.executor
        self.now, self._model = 0.0, model
        core.executor = self

    def start(self, batch: ScheduledBatch) -> Ticket:
        if batch.lens:
            self.now += self._model(batch.starts, batch.lens, sum(batch.samples))
        return self.inner.start(batch)

    def finish(self, ticket: Ticket) -> StepResult:
        result: StepResult = self.inner.finish(ticket)
        return result

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def calls_of(num: int) -> list[Call]:
    """Requests in bursts, four families of which share their first 512 tokens."""
    noise = random.Random(5)
    calls, now = [], 0.0
    for index in range(num):
        now += noise.expovariate(1.2)
        # Short prompts are their own.
        keys = (index % 4, 100 + index) if index % 3 else ()
        calls.append(
            Call(now, noise.randrange(600, 1000) if keys else noise.randrange(20, 300), noise.randrange(1, 40), keys)
        )
    return [call._replace(time=call.time - calls[0].time) for call in calls]


def case_of(num_blocks: int, calls: Sequence[Call], simulated_blocks: int = 0) -> trace_check.Case:
    """A replay on an engine of `num_blocks`, beside the simulation (of other blocks, if given)."""
    core = fake.build(msgspec.structs.replace(CONFIG, num_gpu_blocks_override=num_blocks), vocab_size=50_000)
    clocked = Clocked(core, MODEL)
    replay = trace_check.replay(core, calls, 0, lambda: clocked.now, clocked.sleep)
    if simulated_blocks:
        core.info = msgspec.structs.replace(core.info, num_blocks=simulated_blocks)
    return trace_check._case("x", core, CONFIG, calls, MODEL, [replay])


@pytest.mark.parametrize("num_blocks", [1000, 130])
def test_steps_of_the_model_s_times_give_the_simulation_s_figures(num_blocks: int) -> None:
    case = case_of(num_blocks, calls_of(60))
    assert case.num_requests == 60
    assert [case.predicted_preemptions] == case.preemptions
    for row in [*case.rows, *case.afterwards]:
        assert row.predicted == pytest.approx(row.measured, rel=1e-6), row
    assert case.rows[0].measured > 0


def test_a_small_cache_thrashes_and_another_one_is_another_prediction() -> None:
    """The negative control: the simulation of a large cache is not that of the small one."""
    calls = calls_of(60)
    large, small, crossed = case_of(1000, calls), case_of(130, calls), case_of(130, calls, simulated_blocks=1000)
    assert small.preemptions[0] > large.preemptions[0]
    assert trace_check.is_thrashing([large, small])
    assert not trace_check.is_thrashing([large, large])
    cached = [case.rows[-1].measured for case in (large, small)]
    assert cached[0] > cached[1] + 5
    assert abs(crossed.rows[1].error) > 0.15
    assert abs(crossed.rows[-1].error) > 0.15


def test_requests_that_do_not_fit_are_refused_by_both() -> None:
    calls = [Call(0.0, 10, 3), Call(1.0, 1600, 3), Call(2.0, 10, 3)]
    case = case_of(1000, calls)
    assert (case.num_requests, case.num_refused) == (2, 1)


def test_the_command_compares_with_both_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_model, "FOLDER", tmp_path / "steps")
    monkeypatch.setattr(trace_check, "FIT_SECONDS", 0.0)
    monkeypatch.setattr(planning, "this_machine", lambda: hardware.TABLE["l4"])
    monkeypatch.setattr(checking, "LENGTHS", (4, 8))
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 12 + i, "output_length": 4, "hash_ids": [i]} for i in range(6)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ["headrace", "simulate", str(shallow()), "--trace", str(trace), "--check", "2", "--json"]
    for flags, code in (((), 0), (("--slo", "ttft:1"), 2), (("--replicas", "2"), 2), (("--hardware", "l4"), 2)):
        monkeypatch.setattr(sys, "argv", [*words, *flags])
        with pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code or 0) == code
        if not code:
            result = json.loads(capsys.readouterr().out)
        else:
            assert "--check: 2 is not allowed; it must be left out beside" in capsys.readouterr().err
    assert [case["cache"] for case in result["cases"]] == ["large", "small"]
    assert result["cases"][0]["num_blocks"] > result["cases"][1]["num_blocks"]
    for case in result["cases"]:
        assert [row["what"] for row in case["rows"]][:2] == ["throughput", "TTFT p50"]
        assert case["num_requests"] == 6
        assert len(case["preemptions"]) == 2
        assert all(row["least"] <= row["measured"] <= row["most"] for row in case["rows"])
    assert list((tmp_path / "steps").iterdir())


def test_the_comparison_is_a_table() -> None:
    text = trace_check.report_of(trace_check.TraceCheck(model=MODEL, duration=9.0, cases=[case_of(1000, calls_of(9))]))
    assert "cache         x: 1,000 blocks; 9 requests in 9 s, 0 refused" in text
    assert text.endswith("The small cache does not thrash: more requests at once would make it, by --speed-up.")
    [line] = [line for line in text.splitlines() if line.startswith("TTFT p50")]
    assert "+0.0%" in line.replace("-", "+")


def test_a_trace_without_a_request_that_fits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "this_machine", lambda: hardware.TABLE["l4"])
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9000000, "output_length": 4}')
    monkeypatch.setattr(sys, "argv", ["headrace", "simulate", str(shallow()), "--trace", str(trace), "--check", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--trace: '1 requests' is not allowed; it must be requests of at most" in capsys.readouterr().err
