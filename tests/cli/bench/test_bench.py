"""The arithmetic of the benches, their prompts, and the HTTP client against a server that is scripted to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.bench import serve as bench_serve
from headrace.cli.bench.data import Sample, file_samples, random_samples
from headrace.cli.bench.plans import ServePlan
from headrace.cli.bench.stats import (
    Timeline,
    check_metrics,
    check_percentiles,
    figures,
    is_within_goals,
    peaks,
    percentile,
    table,
)
from headrace.plan.plans import parse_goals
from headrace.protocol.errors import HeadraceError, RequestError

ONE = Timeline(sent=10.0, token_times=[10.2, 10.3, 10.5], done=10.5, num_prompt_tokens=4, num_output_tokens=3)
SINGLE = Timeline(sent=10.0, token_times=[10.4], done=10.4, num_prompt_tokens=6, num_output_tokens=1)
FAILED = Timeline(sent=10.0, done=10.1, num_prompt_tokens=5, error="HTTP 500")


def test_times_of_one_request() -> None:
    assert ONE.ttft == pytest.approx(0.2)
    assert ONE.tpot == pytest.approx(0.15)
    assert ONE.e2el == pytest.approx(0.5)
    assert ONE.itls == pytest.approx([0.1, 0.2])
    assert SINGLE.tpot is None


def test_figures_leave_failed_requests_out() -> None:
    result = figures([ONE, SINGLE, FAILED], 2.0, percentiles=(50.0, 99.0), goals={"ttft": 300.0})
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 4)
    assert result["request_throughput"] == 1.0
    assert result["request_goodput"] == 0.5
    assert result["output_throughput"] == 2.0
    assert result["total_token_throughput"] == 7.0
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["median_tpot_ms"] == pytest.approx(150)
    assert result["p99_itl_ms"] == pytest.approx(199)


def test_goals_are_all_to_be_met() -> None:
    assert is_within_goals(ONE, {"ttft": 201.0, "tpot": 151.0, "e2el": 501.0})
    assert not is_within_goals(ONE, {"ttft": 201.0, "tpot": 149.0})
    assert is_within_goals(SINGLE, {"tpot": 1.0}), "one token has no time per further token"


def test_goodput_is_parsed() -> None:
    assert parse_goals(["ttft:200", "tpot:50.5"], "goodput") == {"ttft": 200.0, "tpot": 50.5}
    for bad in ("ttft", "ttft:", "itl:5", "ttft:-1", "ttft:nan", "ttft:inf", ":5"):
        with pytest.raises(RequestError, match="goodput"):
            parse_goals([bad], "goodput")


def test_peaks() -> None:
    early = Timeline(sent=0.0, token_times=[0.5, 1.5], done=1.5, num_output_tokens=8)
    late = Timeline(sent=1.0, token_times=[1.6], done=1.6, num_output_tokens=1)
    after = Timeline(sent=1.6, token_times=[3.0], done=3.0, num_output_tokens=1)
    assert peaks([early, late, after]) == (5.0, 2)
    assert peaks([]) == (0.0, 0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for share in (1, 25, 50, 99):
        assert percentile(values, share) == pytest.approx(cuts[share - 1], abs=1e-6)
    assert percentile(values, 100) == max(values)


def test_metric_names_and_percentiles_are_checked() -> None:
    assert check_metrics("ttft, e2el") == ["ttft", "e2el"]
    assert check_percentiles("50,99.9") == [50.0, 99.9]
    for bad in ("101", "x", "nan", ""):
        with pytest.raises(RequestError):
            check_percentiles(bad)
    with pytest.raises(RequestError):
        check_metrics("ttft,speed")


def test_table_has_the_lines_of_vllm() -> None:
    result = figures([ONE, SINGLE], 2.0, goals={"ttft": 300.0}) | {"max_concurrency": 2, "request_rate": 4.0}
    lines = table(result).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Request goodput (req/s):                 0.50" in lines
    assert "Mean TTFT (ms):                          300.00" in lines
    assert "P99 E2EL (ms):                           499.00" in lines
    assert max(map(len, lines)) <= 50


def test_random_prompts_are_as_asked_for() -> None:
    result = random_samples(
        50, 100, input_len=20, output_len=10, range_ratio=0.5, prefix_len=3, seed=1, avoid=frozenset({0, 99})
    )
    again = random_samples(
        50, 100, input_len=20, output_len=10, range_ratio=0.5, prefix_len=3, seed=1, avoid=frozenset({0, 99})
    )
    assert result == again
    assert result != random_samples(50, 100, input_len=20, output_len=10, range_ratio=0.5, prefix_len=3, seed=2)
    assert len({tuple(sample.prompt[:3]) for sample in result}) == 1
    assert all(10 <= sample.num_prompt_tokens - 3 <= 30 and 5 <= sample.output_len <= 15 for sample in result)
    assert len({sample.num_prompt_tokens for sample in result}) > 5
    assert not {0, 99} & {token_id for sample in result for token_id in sample.prompt}


def num_words(text: str) -> int:
    return len(text.split())


def test_prompts_of_files(tmp_path: Path) -> None:
    lines = [{"prompt": "one two", "output_tokens": 7}, {"turns": ["three"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    plan = ServePlan(dataset_name="custom", dataset_path=str(tmp_path / "a.jsonl"), num_prompts=3)
    result = file_samples(plan, num_words)
    assert len(result) == 3
    assert {Sample("one two", 2, 7), Sample("three", 1, 256)} == set(result)
    talk = [{"conversations": [{"value": "a b c"}, {"value": "d e"}]}, {"conversations": [{"value": "alone"}]}]
    (tmp_path / "b.json").write_text(json.dumps(talk))
    plan = ServePlan(dataset_name="sharegpt", dataset_path=str(tmp_path / "b.json"), num_prompts=1)
    assert file_samples(plan, num_words) == [Sample("a b c", 3, 2)]
    assert file_samples(msgspec.structs.replace(plan, output_len=9), None) == [Sample("a b c", 0, 9)]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", '{"prompt": 5}', '{"turns": []}'])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    for name in ("a.jsonl", "none"):
        plan = ServePlan(dataset_name="custom", dataset_path=str(tmp_path / name), num_prompts=1)
        with pytest.raises(RequestError, match="dataset_path"):
            file_samples(plan, None)


def test_arrivals() -> None:
    assert bench_serve.arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    times = bench_serve.arrival_times(4001, 10.0, 1.0, 0)
    assert times == bench_serve.arrival_times(4001, 10.0, 1.0, 0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1), "a Poisson process"
    even = bench_serve.arrival_times(4001, 10.0, 100.0, 0)
    assert statistics.stdev(b - a for a, b in itertools.pairwise(even)) < 0.02


class Script(BaseHTTPRequestHandler):
    """Answers by what the prompt says, and keeps what was asked."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "scripted", "root": "somewhere"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        chat = self.path.endswith("/chat/completions")
        content = body["messages"][0]["content"] if chat else body["prompt"]
        if content == "refuse":
            self.reply(400, b'{"error": {"message": "no"}}')
            return
        pieces = [{"delta": {"content": t}} if chat else {"text": t} for t in ("", "he", "llo")]
        events: list[Any] = [{"choices": [{"index": 0, **piece}]} for piece in pieces]
        if content == "break":
            events.append({"error": {"message": "engine died"}})
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.reply(200, (text + ("" if content == "cut" else "data: [DONE]\n\n")).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def scripted() -> Iterator[str]:
    Script.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with contextlib.closing(server.socket):
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def target(url: str, **more: Any) -> bench_serve.Target:
    return bench_serve.Target(base_url=url, endpoint="/v1/completions", model="scripted", **more)


def test_client_counts_what_the_server_reports(scripted: str) -> None:
    samples = [Sample("hi", 3, 5), Sample("refuse", 3, 5), Sample("break", 3, 5), Sample("cut", 3, 5)]
    timelines, duration = asyncio.run(
        bench_serve.run(target(scripted, extra_body={"ignore_eos": True}), samples, ServePlan(max_concurrency=2))
    )
    good, refused, broken, cut = timelines
    assert (good.text, good.error, good.num_prompt_tokens, good.num_output_tokens) == ("hello", "", 9, 2)
    assert len(good.token_times) == 2, "an empty piece is no token"
    assert good.sent <= good.token_times[0] <= good.done
    assert "HTTP 400" in refused.error
    assert "engine died" in broken.error
    assert "DONE" in cut.error
    assert duration > 0
    assert Script.seen[0]["ignore_eos"] is True
    assert Script.seen[0]["stream_options"] == {"include_usage": True}


def test_client_speaks_chat(scripted: str) -> None:
    spoken = bench_serve.Target(base_url=scripted, endpoint="/v1/chat/completions", model="scripted", chat=True)
    [timeline], _ = asyncio.run(bench_serve.run(spoken, [Sample("hi", 3, 5)], ServePlan()))
    assert timeline.text == "hello"
    assert Script.seen[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_a_wait_in_the_client_is_not_the_server_s(scripted: str) -> None:
    """With one slot, later requests wait; their wait is a figure of its own, and `sent` comes after it."""
    timelines, _ = asyncio.run(
        bench_serve.run(target(scripted), [Sample("hi", 3, 5)] * 5, ServePlan(max_concurrency=1))
    )
    ordered = sorted(timelines, key=lambda timeline: timeline.sent)
    assert all(after.sent >= before.done for before, after in itertools.pairwise(ordered))
    assert ordered[-1].queue_time > ordered[0].queue_time


def test_no_server_is_one_error() -> None:
    with pytest.raises(HeadraceError, match="no server at"):
        bench_serve.first_model("http://127.0.0.1:9", {})


def test_first_model(scripted: str) -> None:
    assert bench_serve.first_model(scripted, {}) == {"id": "scripted", "root": "somewhere"}


def test_a_failing_warmup_ends_the_run(scripted: str) -> None:
    with pytest.raises(HeadraceError, match="warm-up"):
        asyncio.run(bench_serve.run(target(scripted), [Sample("refuse", 3, 5)], ServePlan(num_warmups=1)))
