"""A request without another one: the simulation of a recording, against engines that really ran without it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import fake
from tests.support.journal import CONFIG, request
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.core.journal import Step
from headrace.engine.build import make_scheduler
from headrace.engine.records.blind import notes_of, open_recording
from headrace.engine.records.recording import RecordedEngine, Recorder
from headrace.insight.counterfactual import StepTime, fitted, simulate
from headrace.insight.lives import Life, Lives
from headrace.insight.simulated import Behaviour, Oracle, SimulatedExecutor
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, Request, ScheduledBatch, StepResult
from headrace.text.inputs import RequestOptions, make_requests

TIMES = StepTime(0.01, 0.002, 0.0001, 0.0)
Arrivals = list[tuple[float, Request]]


class Timed(SimulatedExecutor):
    """Takes `TIMES` on its own clock."""

    now = 100.0

    def finish(self, ticket: ScheduledBatch) -> StepResult:
        self.now += TIMES.of(ticket.starts, ticket.lens, sum(len(d.token_ids) for d in ticket.drafts.values()))
        return super().finish(ticket)


def record(path: Path, arrivals: Arrivals, config: EngineConfig = CONFIG) -> Path:
    """Record an engine of the requests, each sent at its time. Whether a draft is right depends on what it follows."""
    info = fake.build(config).info

    def guess(step_id: int, index: int, say: Any) -> Draft | None:
        tokens = [say([])]
        tokens.append(say(tokens) if tokens[0] % 2 else 1)
        return Draft(tokens) if tokens[0] % 3 else None

    oracle = Oracle(fake.VOCAB_SIZE, [fake.EOS])
    speculates = config.speculative_config is not None
    behaviour = Behaviour(guess=guess if speculates else None)
    executor = Timed(info.num_blocks, info.block_size, oracle, behaviour)
    scheduler = make_scheduler(config, info, speculates)
    recorder = Recorder(str(path), 2**24, msgspec.msgpack.encode(config), info, 1.5)
    core = RecordedEngine(recorder, None, None, scheduler, executor, info, lambda: executor.now)
    pending = sorted(arrivals, key=lambda each: each[0])
    while pending or core.has_work():
        if not core.has_work():
            executor.now = max(executor.now, pending[0][0])
        while pending and pending[0][0] <= executor.now:
            when, each = pending.pop(0)
            core.add(each, [when, when, when, executor.now])
        core.step()
    core.close()
    return path


def life_of(path: Path, name: str) -> Life:
    lives = Lives()
    for note in notes_of(open_recording(path)):
        lives.follow(note)
    return lives.ended[name]


def times_of(life: Life) -> tuple[float, float]:
    return life.first_token - life.arrival.times[0], life.latency


SHORT = request("short", [*range(100, 110)], 20)
LONG = request("long", [*range(60)], 12)


def test_a_request_is_faster_by_as_much_as_it_really_would_be(tmp_path: Path) -> None:
    both = record(tmp_path / "both", [(100.0, LONG), (100.001, SHORT)])
    alone = record(tmp_path / "alone", [(100.001, SHORT)])
    simulation = simulate(open_recording(both), "short", "long")
    truth, slower = times_of(life_of(alone, "short")), times_of(life_of(both, "short"))
    assert times_of(simulation.recorded) == slower
    assert times_of(simulation.estimated) == pytest.approx(slower, rel=1e-3)
    assert times_of(simulation.without) == pytest.approx(truth, rel=1e-3)
    # Control: it did wait for the long one.
    assert slower[0] > 3 * truth[0]


@pytest.mark.parametrize(("seed", "speculates"), [(0, False), (1, False), (0, True), (1, True)])
def test_evictions_preemptions_and_drafts_are_those_of_the_scheduler(
    tmp_path: Path, seed: int, speculates: bool
) -> None:
    config = CONFIG if speculates else msgspec.structs.replace(CONFIG, speculative_config=None)
    rng = random.Random(seed)
    arrivals: Arrivals = []
    for i in range(14):
        prompt = [7] * rng.choice((0, 8, 12)) + [rng.randrange(200) for _ in range(rng.randint(1, 20))]
        arrivals.append((100 + rng.random(), request(f"r{i}", prompt, rng.randint(3, 30))))
    both = record(tmp_path / "both", arrivals, config)
    assert any(note.step.preemptions for note in notes_of(open_recording(both)))
    other, name = (arrivals[i][1].request_id for i in rng.sample(range(14), 2))
    alone = record(tmp_path / "alone", [each for each in arrivals if each[1].request_id != other], config)
    simulation = simulate(open_recording(both), name, other)
    assert times_of(simulation.estimated) == pytest.approx(times_of(life_of(both, name)), rel=1e-3)
    # Drafts at places where the recording has none are missing.
    error = 0.05 if speculates else 1e-3
    assert times_of(simulation.without) == pytest.approx(times_of(life_of(alone, name)), rel=error)


def step(seconds: float, starts: list[int], lens: list[int]) -> Step:
    return Step(1, (0.0, 0.0, seconds, seconds), list(range(len(starts))), starts, lens)


def test_the_times_of_steps_are_fitted_and_no_part_is_below_zero() -> None:
    shapes = [([5], [1]), ([0], [16]), ([30, 7], [1, 1]), ([40, 3, 0], [1, 1, 9]), ([90] * 4, [1] * 4)]
    exact = fitted([step(TIMES.of(*shape, 0), *shape) for shape in shapes])
    assert exact[:3] == pytest.approx(TIMES[:3], rel=1e-3)
    # Steps that become shorter with more rows.
    odd = fitted([step(1 / sum(shape[1]), *shape) for shape in shapes])
    assert min(odd) >= 0
    # All steps are the same: what they have in common is one part or another.
    same = fitted([step(0.5, [4], [1])] * 9)
    assert same.of([4], [1], 0) == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(HeadraceError, match="no steps"):
        fitted([])


def test_the_command_shows_recorded_and_simulated_times(tmp_path: Path) -> None:
    both = record(tmp_path / "both", [(100.0, LONG), (100.001, SHORT)])
    outcome = CliRunner().invoke(app, ["explain", str(both), "short", "--without", "long"])
    assert outcome.exit_code == 0, outcome.output
    rows = {line[:28].strip(): line[28:].split() for line in outcome.stdout.splitlines()}
    truth = record(tmp_path / "alone", [(100.001, SHORT)])
    ttft, latency = times_of(life_of(truth, "short"))
    assert [float(word) for word in rows["simulated without it"][::2]] == pytest.approx(
        [1e3 * ttft, 1e3 * latency], rel=1e-3
    )
    for arguments in (["short", "--without", "nobody"], ["--without", "long"]):
        outcome = CliRunner().invoke(app, ["explain", str(both), *arguments])
        assert outcome.exit_code
        assert "--without" in str(outcome.exception)


def test_a_recorded_request_is_found_by_the_id_of_its_reply(tmp_path: Path) -> None:
    call_id = "3f2b1c9a-0000-4000-8000-00000000000a"
    requests = make_requests(
        [1, 2, 3], SamplingParams(max_tokens=2, n=2), fake.build(CONFIG).info, RequestOptions(call_id=call_id)
    )
    (other,) = make_requests([1, 2, 3], SamplingParams(max_tokens=2), fake.build(CONFIG).info)
    assert len({each.request_id for each in requests}) == 2
    log = record(tmp_path / "log", [(0.0, requests[0]), (0.1, other)])
    for name in (f"cmpl-{call_id}", "chatcmpl-3f2b", "msg_" + call_id.replace("-", ""), requests[0].request_id):
        done = CliRunner().invoke(app, ["explain", str(log), name])
        assert done.output.startswith(requests[0].request_id), done.output
    assert CliRunner().invoke(app, ["explain", str(log), "cmpl-ffffff"]).exit_code != 0
