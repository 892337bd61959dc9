"""The fleet by a modelled clock: times by hand, the law of tokens, early ends, and the smallest fleet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run_command

from headrace.cli import simulate
from headrace.core.blocks import LAID_OUT
from headrace.fleet import traces
from headrace.fleet.figures import figures
from headrace.fleet.simulator import SimulatedRun, Simulation, Sizes, percentile, smallest_fleet
from headrace.fleet.traces import Call
from headrace.protocol.errors import RequestError

SIZES = Sizes(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256)


def second_a_row(starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
    return float(sum(lens))


def play(
    calls: Sequence[Call], num: int = 1, router: str = "round-robin", sizes: Sizes = SIZES, **limits: Any
) -> SimulatedRun:
    return Simulation(num, router, sizes, second_a_row).run(calls, **limits)


def test_times_are_those_of_the_steps() -> None:
    """A prompt of 20 tokens takes steps of 16 and 4 rows. The second request waits for the step in flight, and the two
    then share steps: 1 row of the first beside 3 of the prompt, then a row each."""
    run = play([Call(0.0, 20, 3), Call(18.0, 3, 2)])
    first, second = sorted(run.lives, key=lambda life: life.arrival)
    assert (first.first, first.end) == (20.0, 26.0)
    assert (second.first, second.end) == (24.0, 26.0)
    assert (first.ttft, first.tpot, first.e2el) == (20.0, 3.0, 26.0)
    assert (second.ttft, second.tpot) == (6.0, 2.0)
    assert (run.num_steps, run.duration, run.num_refused) == (4, 26.0, 0)


def test_an_idle_fleet_waits_for_the_next_request() -> None:
    run = play([Call(0.0, 4, 1), Call(100.0, 4, 1)])
    assert [life.first for life in run.lives] == [4.0, 104.0]


def test_replicas_compute_beside_each_other() -> None:
    calls = [Call(0.0, 4, 2), Call(0.0, 4, 2)]
    assert play(calls, 2).duration == 5.0
    assert play(calls, 1).duration == 10.0
    assert sorted(life.replica for life in play(calls, 2).lives) == [0, 1]


def test_requests_of_one_moment_are_in_one_step() -> None:
    run = play([Call(0.0, 4, 1), Call(0.0, 4, 1), Call(0.5, 4, 1)])
    assert [life.first for life in run.lives] == [8.0, 8.0, 12.0]


def test_prompts_share_what_their_keys_share() -> None:
    sizes = Sizes(num_blocks=1024, block_size=16, max_num_batched_tokens=2048, max_model_len=8192)
    calls = [Call(0.0, 1100, 1, (1, 2, 3)), Call(5000.0, 1100, 1, (1, 2, 4))]
    run = play(calls, sizes=sizes)
    assert [life.num_cached for life in run.lives] == [0, 1024]
    assert [life.ttft for life in run.lives] == [1100.0, 76.0]
    # A router by turns sends the second one elsewhere, one by prefixes does not.
    assert [life.num_cached for life in play(calls, 2, "round-robin", sizes).lives] == [0, 0]
    assert [life.num_cached for life in play(calls, 2, "prefix", sizes).lives] == [0, 1024]


def test_late_dispatch_sends_nothing_behind_a_long_prompt() -> None:
    """Of four requests the first is long. By turns, the third waits behind it if it is sent at once."""
    calls = [Call(0.0, 64, 1), Call(0.0, 4, 1), Call(1.0, 4, 1), Call(1.0, 4, 1)]
    early = Simulation(2, "round-robin", SIZES, second_a_row, is_early=True).run(calls)
    late = play(calls, 2)
    assert [life.replica for life in sorted(early.lives, key=lambda life: life.arrival)].count(0) == 2
    assert max(life.end for life in late.lives if life.num_prompt == 4) < max(
        life.end for life in early.lives if life.num_prompt == 4
    )


def test_a_small_cache_preempts_and_loses_nothing() -> None:
    sizes = Sizes(num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    run = play([Call(0.0, 8, 24) for _ in range(4)], sizes=sizes)
    assert run.num_preemptions > 0
    assert len(run.lives) == 4
    assert all(life.arrival < life.first <= life.end for life in run.lives)


def test_requests_that_no_replica_can_hold_are_counted() -> None:
    run = play([Call(0.0, 300, 1), Call(0.0, 4, 1)])
    assert (run.num_refused, len(run.lives)) == (1, 1)
    # A refused request keeps no goal.
    assert figures(run, 1, {"ttft": 1e9}, 0.0)["kept_share"] == 0.5
    assert play([Call(0.0, 300, 1), Call(0.0, 4, 1)], goals={"ttft": 1e9}, most_failures=0).has_failed


def test_a_fleet_of_large_caches_takes_memory_for_the_blocks_in_use() -> None:
    """A tiny model has millions of blocks on a large machine: 256 replicas of ten million each."""
    calls = [Call(0.1 * place, 400, 20, keys=(place % 5,)) for place in range(300)]
    large, small = Sizes(num_blocks=10**7, max_model_len=4096), Sizes(num_blocks=2000, max_model_len=4096)
    simulation = Simulation(256, "prefix", large, second_a_row)
    run = simulation.run(calls)
    assert sum(len(replica.scheduler.pool.refs) for replica in simulation.replicas) <= 256 * LAID_OUT
    # Neither cache is ever full.
    assert run == Simulation(256, "prefix", small, second_a_row).run(calls)


def test_a_run_is_the_same_every_time() -> None:
    calls = [Call(3.0 * i, 5 + i % 7, 1 + i % 5, (i % 3,)) for i in range(50)]
    for router in ("round-robin", "least-work", "prefix"):
        assert play(calls, 3, router) == play(calls, 3, router)


def test_a_run_that_breaks_too_many_goals_ends_early() -> None:
    calls = [Call(float(i), 8, 4) for i in range(400)]
    goals = {"ttft": 20_000.0}
    whole = play(calls, goals=goals)
    assert not whole.has_failed
    assert len(whole.lives) == 400
    early = play(calls, goals=goals, most_failures=4)
    assert early.has_failed
    assert len(early.lives) < 200
    assert not play(calls, 40, goals=goals, most_failures=0).has_failed


def test_the_smallest_fleet_is_found() -> None:
    calls = [Call(float(i), 8, 4) for i in range(400)]
    goals = {"ttft": 20_000.0}
    result = smallest_fleet(lambda num: play(calls, num, goals=goals, most_failures=4), 64)
    assert result is not None
    num, run = result
    assert num > 1
    assert not run.has_failed
    assert play(calls, num - 1, goals=goals, most_failures=4).has_failed
    assert smallest_fleet(lambda num: play(calls, num, goals={"ttft": 0.001}, most_failures=4), 4) is None


def test_percentiles_are_interpolated() -> None:
    assert percentile([1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0
    assert percentile([5.0], 99) == 5.0
    assert math.isnan(percentile([], 50))


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
)
MOONCAKE = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'


def test_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(AZURE)
    assert [(round(c.time, 3), c.num_prompt, c.num_new) for c in traces.read(path)] == [(0.0, 374, 44), (4.315, 396, 1)]
    assert [round(call.time, 4) for call in traces.read(path, speed_up=2)] == [0.0, 2.1573]
    assert len(traces.read(path, duration=4)) == 1
    path.write_text(MOONCAKE)
    (call,) = traces.read(path)
    assert call == Call(0.0, 600, 5, (0, 7))
    assert call.token_ids(3) == [0] * 512 + [7] * 88
    assert Call(0.0, 2, 1).token_ids(3) != Call(0.0, 2, 1).token_ids(4)


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", AZURE + "x,1,2\n", AZURE + "2023-11-16 18:15:46.6805900,-1,2\n", MOONCAKE + "{}\n", "{",
     '{"timestamp": 0, "input_length": 99999999, "output_length": 5}'],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(RequestError, match="--trace"):
        traces.read(path)


def test_the_command_plays_a_real_trace(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shared_data / "traces" / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
    words = ("--trace", str(path), "--duration", "20", "--hardware", "l4", "--price", "1", "--slo", "ttft:500")
    code, out, _ = run_command(
        monkeypatch, capsys, "simulate", *words, "--replicas", "2", "--router", "round-robin", "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert (result["replicas"], result["requests"], result["prefixes"]) == (2, sum(result["by_replica"]), False)
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["dollars"] == pytest.approx(2 * result["duration"] / 3600)
    code, out, _ = run_command(monkeypatch, capsys, "simulate", *words)
    assert code == 0
    assert "1 x l4, least-work" in out


def test_the_command_prints_hits_and_finds_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": 2048, "output_length": 4, "hash_ids": [0, 1, i % 3, 9 + i]} for i in range(80)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    machine = tmp_path / "slow.json"
    machine.write_text('{"memory": 2e9, "bandwidth": 1e10, "flops": 2e12, "step_overhead": 0.005}')
    words = ("--trace", str(path), "--hardware", str(machine), "--router", "prefix")
    code, out, _ = run_command(monkeypatch, capsys, "simulate", *words, "--slo", "ttft:300", "--slo-share", "95")
    assert code == 0
    num = int(out.split()[1])
    assert num > 1
    assert "of the prompt tokens" in out
    assert "% of the requests keep ttft 300 ms" in out
    monkeypatch.setattr(simulate, "MOST_REPLICAS", 1)
    code, out, _ = run_command(monkeypatch, capsys, "simulate", *words, "--slo", "ttft:300", "--slo-share", "95")
    assert (code, out) == (1, "1 replicas do not keep ttft:300 for 95 % of the requests\n")
    code, out, _ = run_command(monkeypatch, capsys, "simulate", *words, "--slo", "ttft:0.001,tpot:1000,e2el:0.002")
    assert code == 1
    goals = [line.partition(":")[0] for line in out.splitlines() if line.startswith("no number of replicas keeps ")]
    assert goals == ["no number of replicas keeps ttft", "no number of replicas keeps e2el"], "and not the one between"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--router", "random"), "--router: 'random' is not allowed; it must be one of round-robin"),
        (("--replicas", "0"), "--replicas: 0"),
        (("--block-size", "0"), "--block-size: 0"),
        (("--speed-up", "0"), "--speed-up: 0.0 is not allowed; it must be above 0"),
        (("--dtype", "int5"), "--dtype: 'int5' is not allowed; it must be one of auto"),
        (("--quantization", "int5"), "--quantization: 'int5'"),
        (("--slo", "x"), "--slo: 'x'"),
        (("--trace", "nothing.csv"), "--trace: 'nothing.csv'"),
    ],
)
def test_errors_are_in_the_words_of_the_flags(
    tmp_path: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "trace"
    path.write_text(AZURE)
    code, _, err = run_command(monkeypatch, capsys, "simulate", "--hardware", "l4", "--trace", str(path), *words)
    assert code == 2
    assert message in err
