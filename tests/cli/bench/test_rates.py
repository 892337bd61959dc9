"""`bench sweep`, `bench report`, `bench latency --no-kv-cache`, and traces in `bench serve`."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.bench.data import Sample, trace_samples
from headrace.cli.bench.offline import PARAMS, run_batch, run_uncached
from headrace.cli.bench.plans import ServePlan
from headrace.cli.bench.report import page, read
from headrace.cli.bench.sweep import print_sweep, sweep
from headrace.cli.main import main
from headrace.engine.build import build_engine
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError


def server(capacity: float) -> Any:
    """A server that keeps the goals of all requests up to a rate, and of half of them beyond."""

    def measure(rate: float) -> dict[str, Any]:
        goodput = rate if rate <= capacity else rate / 2
        times = {f"{share}_{name}_ms": 1.0 for share in ("median", "p99") for name in ("ttft", "tpot")}
        return {"completed": 100, "failed": 0, "duration": 100 / rate, "request_throughput": rate,
                "request_goodput": goodput, "output_throughput": 9.0, **times}  # fmt: skip

    return measure


def test_a_sweep_closes_in_on_the_highest_rate(capsys: pytest.CaptureFixture[str]) -> None:
    result = sweep(server(11.0), 1.0, 0.99, 10)
    rates = [run["request_rate"] for run in result["runs"]]
    assert rates == sorted(rates)
    assert len(rates) == 10
    assert {1.0, 2.0, 4.0, 8.0, 16.0, 12.0, 10.0} <= set(rates)
    assert 10.5 <= result["best_rate"] <= 11.0
    print_sweep(result)
    assert f"99% of the requests keep all goals: {result['best_rate']:.2f} requests/s." in capsys.readouterr().out


def test_a_sweep_goes_down_where_it_begins_too_high(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(server(0.3), 4.0, 0.99, 8)["best_rate"] == pytest.approx(0.3, abs=0.05)
    print_sweep(sweep(server(0.0), 4.0, 0.99, 3))
    assert "At no rate 99% of the requests keep all goals." in capsys.readouterr().out
    print_sweep(sweep(server(1e9), 4.0, 0.99, 3))
    assert "the highest is above 16.00 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("--goodput", "ttft:200", "--request-rate", "inf")])
def test_a_sweep_needs_goals_and_a_rate(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "sweep", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert ("--request-rate" if words else "--goodput: None") in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "speculate"])
def test_a_picture_that_can_not_be_drawn_is_refused_before_anything_is_measured(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ("--goodput", "ttft:200", "--request-rate", "1") if command == "sweep" else ()
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", command, *words, "--plot", "rates.svg"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--plot: 'rates.svg' is not allowed; it must be left out" in capsys.readouterr().err


def test_a_report_that_can_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text("{}")
    words = [str(tmp_path / "a.json"), "--output", str(tmp_path / "none" / "r.html")]
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "report", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "a file that can be written (No such file or directory)" in capsys.readouterr().err


def test_a_report_has_a_column_for_each_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, out = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "r.html"
    first.write_text(
        '{"model_id": "<m>", "mean_ttft_ms": 2.5, "output_throughput": 100.0, "errors": ["x"], "ok": true}'
    )
    second.write_text('{"model_id": "n", "mean_ttft_ms": 5.0, "output_throughput": 200.0}')
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "report", str(first), str(second), "--output", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    text = out.read_text()
    assert "<th>a</th><th>b</th>" in text
    assert "<td>&lt;m&gt;</td><td>n</td>" in text
    assert '<td class="best">2.50<div class="bar" style="width:50%">' in text
    assert '<td class="best">200.00<div class="bar" style="width:100%">' in text
    assert "errors" not in text
    assert "<script" not in text
    assert capsys.readouterr().out == f"{out}: 2 results\n"


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("[1]", "{"):
        path.write_text(text)
        with pytest.raises(RequestError, match="FILES"):
            read([path])
    assert "<table>" in page([], [])


def test_without_a_cache_the_grown_prompt_is_computed_again() -> None:
    config = EngineConfig(max_model_len=64, num_threads=1, num_gpu_blocks_override=32, enable_prefix_caching=False)
    samples = [Sample([5, 6, 7, 8], 4, 3), Sample([9, 10], 2, 2)]
    with closing(build_engine(config)) as core:
        cached = run_batch(core, samples, PARAMS)
        num_cached = core.stats().num_batched_tokens
        uncached = run_uncached(core, samples, PARAMS)
        num_uncached = core.stats().num_batched_tokens - num_cached
    assert [timeline.num_output_tokens for timeline in uncached] == [t.num_output_tokens for t in cached] == [3, 2]
    assert num_cached == (4 + 1 + 1) + (2 + 1)
    assert num_uncached == (4 + 5 + 6) + (2 + 3)


def test_requests_of_a_trace_come_when_they_came_and_share_what_they_shared(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = [{"timestamp": 1000 * i, "input_length": 700, "output_length": 5, "hash_ids": [0, i]} for i in (1, 2, 3)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    plan = ServePlan(dataset_name="mooncake", dataset_path=str(path), num_prompts=2, speed_up=4.0)
    first, second = trace_samples(plan, 100, frozenset([3]))
    assert (first.due, second.due, first.output_len, len(first.prompt)) == (0.0, 0.25, 5, 700)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:]
    assert 3 not in first.prompt
    with pytest.raises(RequestError, match="dataset_path"):
        trace_samples(ServePlan(dataset_name="azure", dataset_path="nothing"), 100)
