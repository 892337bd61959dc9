"""The fitted times of steps, and `headrace plan --check` on the built-in model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from headrace import LLM
from headrace.cli import checking
from headrace.cli.main import main
from headrace.plan import hardware
from headrace.plan.fitted import Sample, fit
from headrace.plan.planner import Planner, read
from headrace.plan.plans import Workload
from headrace.protocol import step_model
from headrace.protocol.errors import CheckpointError, HeadraceError
from headrace.protocol.step_model import StepModel, num_alone, num_seen


def seconds_of(num_rows: int, num_logits: int, num_seen: float) -> float:
    """A machine whose rows are cheap up to 16, and dear beyond."""
    return 0.004 + 1e-4 * max(0, num_rows - 1) + 4e-4 * max(0, num_rows - 16) + 2e-4 * num_logits + 1e-7 * num_seen


def made_samples(num: int) -> list[Sample]:
    noise = random.Random(1)
    shapes = [(noise.randrange(1, 301), noise.randrange(5), noise.random() * 9000) for _ in range(num)]
    return [Sample(rows, logits, seen, seconds_of(rows, logits, seen)) for rows, logits, seen in shapes]


def test_a_fit_predicts_steps_that_it_did_not_see() -> None:
    model = fit(made_samples(400))
    assert model.p90_error < 1e-6
    assert model.num_steps == 400
    for shape in ((3, 1, 50.0), (64, 0, 3000.0), (200, 4, 0.0)):
        assert model.of(*shape) == pytest.approx(seconds_of(*shape), rel=1e-6)
    assert model([10, 20], [1, 30], 2) == pytest.approx(seconds_of(31, 2, 10.5 + 30 * 35.0))


def test_a_fit_says_how_far_off_it_is() -> None:
    noise = random.Random(2)
    rough = [sample._replace(seconds=sample.seconds * noise.choice((0.8, 1.25))) for sample in made_samples(400)]
    assert 0.1 < fit(rough).median_error < 0.4
    few = [each._replace(seconds=each.seconds * noise.choice((1, 1, 1, 1, 2))) for each in made_samples(400)]
    assert fit(few).median_error < 0.2 < 0.4 < fit(few).p90_error


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(HeadraceError, match="39 steps were measured, and 40 at least"):
        fit(made_samples(39))


def test_a_kept_model_is_read_again_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x" / "model.json"
    assert step_model.load(path) is None
    model = fit(made_samples(100))
    step_model.save(path, model)
    assert step_model.load(path) == model
    path.write_text('{"base": 1}')
    with pytest.raises(CheckpointError, match="--check writes it anew"):
        step_model.load(path)
    path.write_text('{"base": 1, "knots": [1], "slopes": [], "logits": 0, "seen": 0}')
    with pytest.raises(CheckpointError, match="differ in number"):
        step_model.load(path)


SMALL_CHECK = """
import sys
from pathlib import Path

from headrace.cli import checking, plan, planning
from headrace.cli.main import main
from headrace.plan import hardware
from headrace.protocol import step_model

step_model.FOLDER = Path(sys.argv.pop())
plan.CHECK_SECONDS = 0.0
planning.this_machine = lambda: hardware.TABLE["l4"]
checking.LENGTHS, checking.NUM_REPEATS, checking.CASES = (4, 8), 2, ((2, 16, 4),)
checking.time.monotonic = lambda: 0.0


def noted(name):
    inner = getattr(checking, name)

    def note(*args, **fields):
        print(name, file=sys.stderr)
        return inner(*args, **fields)

    setattr(checking, name, note)


noted("measured_steps")
noted("run_batch")
main()
"""
"""`headrace` with as little work for --check as there can be, which it names on stderr."""


def test_check_compares_and_the_plan_then_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: in this one, memory that earlier tests have freed would count less.
    command = [sys.executable, "-c", SMALL_CHECK, "plan", "builtin", "--check", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    result = json.loads(done.stdout)
    assert [row["what"].split()[0] for row in result["rows"]] == ["TTFT", "TPOT", "memory"]
    assert all(row["measured"] > 0 for row in result["rows"])
    assert result["rows"][-1]["measured"] > 0.5 * result["rows"][-1]["predicted"]
    turns = [line for line in done.stderr.splitlines() if line in ("measured_steps", "run_batch")]
    assert turns == ["measured_steps", "run_batch"] * 2
    monkeypatch.setattr(step_model, "FOLDER", tmp_path)
    # One file for the planner, and one that the explanations of such an engine find.
    with closing(LLM("builtin")) as llm:
        path = step_model.path_of_engine(llm.core.info)
    assert {*tmp_path.iterdir()} == {Path(result["path"]), path}
    assert step_model.load(path) == step_model.load(Path(result["path"]))
    one = Planner(read("builtin"), hardware.TABLE["l4"], Workload())
    before = one.speed(1).tpot
    one.use_measured_steps()
    assert isinstance(one.step, StepModel)
    assert one.speed(1).tpot != before
    assert one.plan().step_source == "by steps that --check measured here"
    other = Planner(read("builtin"), hardware.TABLE["l4"], Workload(quantization="int4"))
    other.use_measured_steps()
    assert not isinstance(other.step, StepModel)


def test_check_is_of_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "plan", "builtin", "--check", "--hardware", "l4"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--check: 'l4' is not allowed" in capsys.readouterr().err


def test_the_comparison_is_a_table() -> None:
    model = StepModel(base=1.0, knots=(1,), slopes=(0.1,), logits=0.0, seen=0.0, num_steps=50, most_rows=9)
    rows = [
        checking.Compared(what="TTFT", unit="ms", predicted=11.0, measured=10.0, least=9.0, most=12.0),
        checking.Compared(what="TPOT", unit="ms", predicted=20.0, measured=10.0, least=9.0, most=12.0),
    ]
    text = checking.report_of(checking.Check(model=model, path="here", rows=rows))
    first, second = text.splitlines()[-2:]
    assert "+10.0%" in first
    assert first.endswith("9.00 to 12.00, predicted within")
    assert "+100.0%" in second
    assert second.endswith("9.00 to 12.00")


def test_rows_that_look_back_alone_have_a_slope_of_their_own() -> None:
    shapes = [([100 * i] * rows, [size] * rows) for i in range(1, 12) for rows in (1, 3) for size in (1, 5, 20)]
    samples = []
    for starts, lens in shapes:
        seen, alone = num_seen(starts, lens), num_alone(starts, lens)
        seconds = 0.004 + 1e-4 * sum(lens) + 1e-7 * seen + 2e-7 * alone
        samples.append(Sample(sum(lens), len(lens), seen, seconds, alone))
    model = fit(samples)
    assert model.of(1, 1, 2000.5, 2000.5) == pytest.approx(0.0041 + 3e-7 * 2000.5, rel=0.02)
    assert model([2000], [1], 1) == pytest.approx(model.of(1, 1, 2000.5, 2000.5))
