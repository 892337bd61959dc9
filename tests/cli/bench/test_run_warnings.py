"""The warnings of `bench serve`: each appears where its fault is planted and nowhere else; and vLLM's fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.cli.bench.test_bench import Script, scripted, target

from headrace.cli.bench import run_warnings
from headrace.cli.bench import serve as bench_serve
from headrace.cli.bench.data import Sample, random_samples
from headrace.cli.bench.plans import ServePlan
from headrace.cli.bench.stats import Timeline
from headrace.protocol.errors import RequestError

__all__ = ["scripted"]

NUM = 40
VLLM = (
    "backend burstiness completed duration endpoint_type failed label max_concurrency max_concurrent_requests "
    "max_output_tokens_per_s mean_itl_ms mean_tpot_ms mean_ttft_ms median_itl_ms median_tpot_ms median_ttft_ms "
    "model_id num_prompts output_throughput p99_itl_ms p99_tpot_ms p99_ttft_ms request_goodput request_rate "
    "request_throughput std_itl_ms std_tpot_ms std_ttft_ms tokenizer_id total_input_tokens total_output_tokens "
    "total_token_throughput"
).split()
"""The fields of a result of `vllm bench serve`, but for the date; and those with --save-detailed."""
VLLM_DETAIL = ("errors", "generated_texts", "input_lens", "itls", "output_lens", "start_times", "ttfts")


def run_of(change: Callable[[int, Timeline], None]) -> list[str]:
    """The warnings of a good run in which `change` was made to each timeline."""
    samples = random_samples(NUM, 1000, input_len=100, output_len=5, prefix_len=20, seed=1)
    timelines = []
    for index in range(NUM):
        at = float(index)
        times = [at + 0.1 + 0.01 * i for i in range(5)]
        timeline = Timeline(
            sent=at, token_times=times, done=times[-1], num_prompt_tokens=120, num_output_tokens=5,
            num_cached_tokens=16 if index else 0,
        )  # fmt: skip
        change(index, timeline)
        timelines.append(timeline)
    return run_warnings.warnings_of(timelines, samples, has_rate=True, is_token_ids=True)


def late(index: int, timeline: Timeline) -> None:
    timeline.late = 0.05 if index % 3 == 0 else 0.001


def warm(index: int, timeline: Timeline) -> None:
    timeline.num_cached_tokens = 112


def short(index: int, timeline: Timeline) -> None:
    timeline.num_output_tokens = 3 if index % 4 == 0 else 5


def slower(index: int, timeline: Timeline) -> None:
    timeline.token_times = [time + 0.1 * (index >= NUM // 2) for time in timeline.token_times]
    timeline.done = timeline.token_times[-1]


def slower_tokens(index: int, timeline: Timeline) -> None:
    timeline.done += 0.04 * (index >= NUM // 2)


def nothing(index: int, timeline: Timeline) -> None:
    timeline.late = 0.05 if index == 3 else 0.0
    timeline.num_output_tokens = 4 if index == 5 else 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (late, "client queueing: 14 of 40 requests were sent after their time, p50 50 ms late"),
        # 112 + 39 * (112 - 20), less one token that two prompts share by chance.
        (warm, "warm cache: 3,699 prompt tokens of 40 requests were cached before the run"),
        (short, "unequal lengths: 10 of 40 answers are shorter than requested, 3 tokens of 5"),
        (slower, "drift: the median TTFT of the first half is 100.0 ms, of the second 200.0 ms"),
        (slower_tokens, "drift: the median TPOT of the first half is 10.0 ms, of the second 20.0 ms"),
    ],
)
def test_a_planted_fault_is_the_one_warning(change: Callable[[int, Timeline], None], words: str) -> None:
    [warning] = run_of(change)
    assert warning.startswith(words)


def test_a_good_run_has_none() -> None:
    """Nor has one with the shared prefix cached, one late request, and one short answer."""
    assert run_of(nothing) == []


def test_without_a_rate_requests_are_not_late_and_do_not_drift() -> None:
    samples = [Sample([1, 2, 3], 3, 2)] * NUM
    timelines = [
        Timeline(sent=0.0, late=9.0, token_times=[1.0 + i, 2.0 + i], done=2.0 + i, num_output_tokens=2)
        for i in range(NUM)
    ]
    assert run_warnings.warnings_of(timelines, samples, has_rate=False, is_token_ids=True) == []
    assert len(run_warnings.warnings_of(timelines, samples, has_rate=True, is_token_ids=True)) == 2
    failed = [msgspec.structs.replace(timeline, error="x") for timeline in timelines]
    assert run_warnings.warnings_of(failed, samples, has_rate=True, is_token_ids=True) == []


def test_a_template_may_be_cached() -> None:
    pairs = [(Timeline(sent=0.0, num_prompt_tokens=100, num_cached_tokens=48), Sample("hello", 1, 1))]
    assert run_warnings.warm_cache(pairs, run_warnings.TEMPLATE_TOKENS) == ""
    assert run_warnings.warm_cache(pairs, 0).startswith("warm cache: 48 prompt tokens of 1 requests")


def test_a_client_with_one_slot_is_late(scripted: str) -> None:
    """A real client: requests that are due at once and share one slot are late by what they waited."""
    plan = ServePlan(max_concurrency=1)
    timelines, _ = asyncio.run(bench_serve.run(target(scripted), [Sample("hi", 3, 5)] * 5, plan))
    ordered = sorted(timelines, key=lambda timeline: timeline.sent)
    assert ordered[0].late < ordered[-1].late
    assert all(timeline.late >= timeline.queue_time for timeline in timelines)


def test_a_warm_up_is_another_prompt(scripted: str) -> None:
    asyncio.run(bench_serve.run(target(scripted), [Sample([1, 2, 3], 3, 5)], ServePlan(num_warmups=1)))
    assert [body["prompt"] for body in Script.seen] == [[3, 2, 1], [1, 2, 3]]


def test_the_result_has_vllm_s_fields_and_a_picture(scripted: str, tmp_path: Path) -> None:
    plan = ServePlan(
        base_url=scripted, tokenizer="builtin", num_prompts=3, random_input_len=4, random_output_len=2, request_rate=99,
        json=True,
    )  # fmt: skip
    result, detail = bench_serve.measure_server(plan, {}, ("ttft", "tpot", "itl"), (99.0,))
    assert set(VLLM) <= result.keys()
    assert set(VLLM_DETAIL) <= detail.keys()
    # On a loaded machine this client may really be late.
    assert all(warning.startswith("client queueing") for warning in result["warnings"])
    json.dumps(result)
    bench_serve.plot(result, detail, tmp_path / "a" / "x.svg")
    assert (tmp_path / "a" / "x.svg").read_text().startswith("<?xml")
    with pytest.raises(RequestError, match="dataset_name"):
        bench_serve.measure_server(msgspec.structs.replace(plan, dataset_name="no"), {}, ("ttft",), (99.0,))
