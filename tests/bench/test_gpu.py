"""The checks for a machine with a GPU, at toy size on a CPU: every stage runs, and what goes wrong is kept."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.gpu import __main__ as program
from bench.gpu import families, goals, prove, shapes, speed, tune
from bench.gpu.cases import problems
from bench.gpu.compiling import Recorder, recipe, signature, standing
from bench.gpu.device import Device
from bench.gpu.engine import Answers, Law
from bench.gpu.probes import FEW_KERNELS, launched, probes
from bench.gpu.problems import Problem, linear_problem, linear_ws_problem
from bench.gpu.report import Report, read

from headrace.backends.cuda import tuned
from headrace.backends.cuda.cache import STORED
from headrace.backends.cuda.launch import Config


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "stage.json", time.time() + 600)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(toy=True)


def failed(report: Report) -> dict[str, Any]:
    return {item["name"]: item for item in report.items if item["status"] != "ok"}


def test_prove(report: Report, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(problems(True))[::6]
    ways = [item for item in Law(device).items() if item[0].endswith(("preempted", "torch_ref"))]
    monkeypatch.setattr(prove, "problems", lambda toy: few)
    monkeypatch.setattr(Law, "items", lambda self: ways)
    prove.run(report, device)
    assert failed(report) == {}
    assert len(report.items) > len(few) + 5
    assert read(report.path)["items"] == report.items


def test_every_kernel_has_a_problem() -> None:
    kernels = {launch.kernel.name for _, make in problems(True) for launch in launches(make())}
    folder = Path(tuned.__file__).parent / "kernels"
    names = {line.split("(")[0][4:] for path in folder.glob("*.py") for line in entries(path.read_text())}
    assert names - kernels == {"_highest", "_survey", "_pick", "_settle"}  # Checked by a probe.


def launches(problem: Problem) -> list[Any]:
    return list(problem.make(problem.fresh("cpu"), None))


def entries(text: str) -> list[str]:
    """The lines after @triton.jit or @gluon.jit of functions that are launched: those named by a `Kernel(...)`."""
    lines = text.splitlines()
    jitted = [after for line, after in itertools.pairwise(lines) if line.startswith(("@triton.jit", "@gluon.jit"))]
    return [line for line in jitted if f"Kernel({line.split('(')[0][4:]}," in text.replace("Kernel(\n    ", "Kernel(")]


def test_a_wrong_kernel_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = linear_problem(5, 80, 600, torch.bfloat16)
    assert prove.check(problem, device)["fault"] == ""
    written = prove.written

    def shifted(problem: Problem, device: Device, config: Config | None) -> dict[str, torch.Tensor]:
        return {name: tensor.roll(1, 0) for name, tensor in written(problem, device, config).items()}

    monkeypatch.setattr(prove, "written", shifted)
    assert "differs from the twin" in prove.check(problem, device)["fault"]


def test_a_family_that_leans_on_its_neighbours_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    form = next(families.forms(True))
    assert families.family(device, form)["fault"] == ""
    right = families.logits

    def leaning(*call: Any) -> Any:
        return right(*call) * np.float32(1 + 1e-6 * len(call[1]))

    monkeypatch.setattr(families, "logits", leaning)
    assert families.family(device, form)["fault"].startswith("other bits: 75 positions in pieces of [7, 30")
    monkeypatch.setattr(families, "logits", lambda *call: right(*call) + ("cuda" in type(call[0]).__module__))
    assert "logits differ from torch_ref's" in families.family(device, form)["fault"]


def test_a_family_without_kernels_is_refused_by_name(device: Device) -> None:
    wrong = families.family(device, families.Form("llama", {"model_type": "llama"}, "bfloat16"))
    assert wrong["fault"] == "it does not load"


def test_tune_writes_configs_that_the_backend_reads(report: Report, device: Device) -> None:
    tune.run(report, device)
    assert failed(report) == {}
    path = report.path.with_name("tuned.json")
    table = tuned.read(path.stem, path.parent)
    kernels = {"_linear", "_linear_codes", "_linear_8bit", "_linear_ws", "attention few", "attention many"}
    assert set(table) == kernels
    config = shapes.layers(shapes.TOY)[0]
    shape = tuned.matrix_shape(config.num_out, config.num_in, "bfloat16", False)
    assert [set(table[name][shape]) for name in ("_linear", "_linear_ws")] == [{"1"}, {"70"}]


def test_a_config_with_other_bits_is_not_taken(device: Device) -> None:
    choice = next(tune.listed(device))
    wrong = choice.configs[1].name

    def make(config: Config, copy: int) -> tuple[list[Any], torch.Tensor]:
        outcome, out = choice.make(config, copy)
        return outcome, out if config.name != wrong else torch.zeros_like(out)

    result = tune.measure(dataclasses.replace(choice, make=make), device)
    assert result["fault"] == f"{wrong}: other bits"
    assert wrong not in result["times"]


def test_goals_are_judged(report: Report) -> None:
    report.run("engine 8b bf16 x1", lambda: {"share": 0.9})
    report.run("engine 8b bf16 x128", lambda: {"share": 0.8, "idle": 0.2})
    report.run("draw 256 x 128256", lambda: {"ms": 0.5})
    late = Report(report.path, time.time() - 1)
    goals.judge(late)
    met = {item["name"]: item.get("met", item["value"]) for item in late.items[3:]}
    assert len(met) == len(goals.GOALS)
    assert met.pop("goal: 8B bf16, batch 1: share of the floor") == "yes"
    assert met.pop("goal: 8B bf16, batch 256: share of the floor") == "yes"
    assert met.pop("goal: GPU idle, batch 256") == "no"
    assert met.pop("goal: drawing 256 rows of 128k, ms") == "no"
    assert set(met.values()) == {"not measured"}


def test_batches_follow_the_memory() -> None:
    fitting = functools.partial(shapes.batches_that_fit, shapes.MODELS["8b"], speed.BATCHES, speed.CONTEXT + 16)
    assert fitting(140 * 2**30) == (1, 8, 64, 128, 256)
    assert fitting(79 * 2**30) == (1, 8, 64, 128)
    assert fitting(22 * 2**30) == (1,)
    assert max(shapes.batches_that_fit(shapes.MODELS["l1b"], speed.BATCHES, speed.CONTEXT + 16, 79 * 2**30)) == 256


def test_greedy_ids_are_compared_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(toy=True)
    device.name = "elsewhere"
    law, places = Law(device), list[str]()

    def by_torch_ref(place: str, dtype: str) -> Answers:
        places.append(place)
        return law.alone()

    law.reference = Answers()
    law.reference.token_ids = {request.request_id: [5] for request in law.requests}
    monkeypatch.setattr(law, "by_torch_ref", by_torch_ref)
    assert law.greedy() == {"equal": 2, "close": 0, "gaps": [], "fault": ""}
    assert places == ["elsewhere"]


def test_decode_and_prefill_are_compared_for_every_cache(device: Device) -> None:
    names = {name.rpartition(" ")[2] for name, _ in probes(device) if name.startswith("decode against prefill")}
    assert names == {*STORED, "sinks", "chunks", "heads"}


def test_the_page_has_every_goal() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text().partition("## Goals")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert all(row[3] in ("yes", "no", "not measured") for row in rows)
    expected = [(goal.text, f"at {'most' if goal.at_most else 'least'} {goal.bound:g}") for goal in goals.GOALS]
    assert [(row[0], row[1].split(",")[0]) for row in rows] == expected


def test_the_page_has_the_figures_of_the_first_run() -> None:
    root = Path(__file__).parents[2]
    page = " ".join((root / "docs" / "gpu.md").read_text().split())
    items: dict[str, dict[str, Any]] = {}
    for name in ("bench", "8b", "serving", "small"):
        record = read(root / "bench" / "results" / f"gpu-{name}.json")
        assert record["head"]["name"] == "NVIDIA H100 80GB HBM3"
        items |= {item["name"]: item for item in record["items"]}
    for batch in (1, 64):
        step, engine = items[f"decode 8b bf16 x{batch}"], items[f"engine 8b bf16 x{batch} (80 GB)"]
        speed_of = f"{engine['tokens_per_second']:.4g}" if batch == 1 else f"{engine['tokens_per_second']:,.0f}"
        assert f"{step['share']:.2f} ({step['share_of_gpu']:.2f}), {speed_of} tok/s" in page
    trace, price = items["trace 8b bf16 (at most 128 sequences)"], items["price of the law 8b"]
    assert f"{trace['tokens_per_second']:,.0f} tok/s in and out, TTFT {trace['ttft_ms_p50']:.0f} ms" in page
    assert f"| {price['decode']:.3f} without" in page
    assert f"| {price['prefill']:.3f} without" in page
    assert f"| {items['draw 256 x 128256']['ms']:.2f} |" in page
    assert f"{items['prefill 8b bf16 8192']['share']:.3f}, 31.4k" in page
    theirs = items["transformers static l1b x256"]["seconds_of_job"]
    ours = items["job l1b bf16 (defaults beyond the measured rows)"]["seconds_of_job"]
    assert f"{theirs / ours:.1f}: {ours:.2f} s beside {theirs:.2f} s" in page
    probes_of_law = read(root / "bench" / "results" / "gpu-prove.json")["items"]
    wrong = [item["wrong"] for item in probes_of_law if item["name"].startswith("law: ") and "wrong" in item]
    assert wrong == [0] * 5


def test_items_are_chosen_by_parts_of_their_names(tmp_path: Path) -> None:
    report = Report(tmp_path / "stage.json", time.time() + 600, "draw|x64")
    assert [report.wants(name) for name in ("draw 256", "engine x64", "engine x6")] == [True, True, False]


def test_a_failure_is_kept_and_the_stage_goes_on(report: Report) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such thing")

    report.run("first", fail)
    report.run("second", lambda: {"figure": 2.0})
    report.run("third", lambda: {"fault": "other bits"})
    assert [item["status"] for item in read(report.path)["items"]] == ["failed", "ok", "failed"]
    assert "no such thing" in report.items[0]["error"]
    assert report.close() == 2


def test_another_process_goes_on_behind_what_hung(report: Report) -> None:
    report.run("first", lambda: {"figure": 1.0})
    report.items.append({"name": "second", "status": "running"})
    report.close()
    again = Report(report.path, time.time() + 60)
    again.run("first", lambda: {"figure": 3.0})
    again.run("second", lambda: {"figure": 3.0})
    again.run("third", lambda: {"figure": 3.0})
    assert [item.get("figure") for item in again.items] == [1.0, None, 3.0]
    assert again.items[1]["error"] == "the process ended or hung"


def test_items_are_left_out_when_the_time_is_over(tmp_path: Path) -> None:
    late = Report(tmp_path / "late.json", time.time() - 1)
    late.run("first", lambda: {"figure": 1.0})
    late.run("goal", lambda: {"value": 1.0}, is_free=True)
    assert [item["status"] for item in late.items] == ["left out: no time", "ok"]


def test_an_item_that_would_exceed_the_time_is_left_out(report: Report) -> None:
    report.run("long", lambda: {"figure": 1.0}, seconds=700)
    report.run("short", lambda: {"figure": 1.0}, seconds=60)
    assert [item["status"] for item in read(report.path)["items"]] == ["left out: no time", "ok"]


def test_an_item_within_which_the_time_ended_did_not_fail(report: Report) -> None:
    report.items.append({"name": "long", "status": "running"})
    report.close()
    late = Report(report.path, time.time() - 1)
    assert late.items[0]["status"] == "left out: the stage's time ended within it"
    assert late.close() == 0


def test_a_stage_takes_nine_minutes_at_most() -> None:
    assert program.SECONDS + program.GRACE < 9 * 60


def test_stages_share_the_minutes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program.end_of_stage(1000.0, 1000.0 + 3600) == 1000 + program.SECONDS
    assert program.end_of_stage(1000.0, 1000.0 + 90) == 1090 - program.GRACE
    assert program.share_of_stage("prove", True, 1000.0, 1100.0) == 1045
    assert program.share_of_stage("prove", False, 1000.0, 1100.0) == 1100
    args = argparse.Namespace(out=tmp_path, only="", toy=True, minutes=2.0)
    assert program.supervise("tune", args, time.time() + 5) == 0
    assert "tune: left out, the 2 minutes are over" in capsys.readouterr().out
    assert [program.minutes(text) for text in ("15", "1.5")] == [15, 1.5]
    for text in ("0.5", "1441", "ten", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 1440"):
            program.minutes(text)


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SILENCE", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert program.watch(process, tmp_path / "none.json", time.time() + 60) == -1
    assert process.returncode is not None


def test_the_command(tmp_path: Path) -> None:
    words = ["bench", "--out", str(tmp_path), "--only", "goal: draw"]
    done = subprocess.run([sys.executable, "-m", "bench.gpu", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3 items, 0 failed" in done.stdout
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["head"]["toy"]
    assert record["items"][1]["value"] == "not measured"


def test_what_the_probes_launch_is_compiled_before() -> None:
    recipes = launched(toy=True)
    assert {each["name"] for each in recipes} >= {"_linear", "_linear_codes", "_linear_ws", "_widen", "_attention"}
    assert {each["constants"].get("SWAP") for each in recipes if each["name"] == "_linear"} == {0, 1}
    assert len({signature(each) for each in recipes}) < len(recipes)


def test_probes_of_full_size_can_be_launched() -> None:
    recorder = Recorder(toy=True)
    recorder.toy = False
    for name, probe in probes(recorder):
        if name not in FEW_KERNELS and not name.startswith("rows"):
            probe()
    assert len(recorder.recipes) > 100


def test_launches_that_differ_in_fixed_sizes_alone_are_compiled_once(device: Device) -> None:
    first, second, third = (
        signature(recipe(launches(linear_problem(*sizes, torch.bfloat16))[0]))
        for sizes in ((5, 80, 600), (6, 96, 600), (5, 80, 640))
    )
    assert first == second
    assert first != third


def test_what_stands_for_tiles_of_a_matrix_has_their_type() -> None:
    """It goes to another process, without the matrix."""
    (launch,) = launches(linear_ws_problem(70, 80, 600, torch.bfloat16))
    arguments = pickle.loads(pickle.dumps(recipe(launch)))["arguments"]  # noqa: S301
    for name, dtype in (("x", torch.bfloat16), ("weight", torch.bfloat16)):
        actual, expected = standing(*arguments[name]), launch.arguments[name]
        assert (actual.base.dtype, actual.layout) == (dtype, expected.layout)
        assert list(actual.block_shape) == list(expected.block_shape)
