"""`headrace bench ablate`: one small run of the whole command, in which each rung's technique is seen at work in its
engine, and not in the rung before; the arithmetic of samples; refusals."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.shallow import shallow

from headrace.cli.bench import ablate, runs
from headrace.cli.bench.ablate import Bound, check_answers, measure_ablation
from headrace.cli.bench.ablation_text import markdown, notes, plot, print_ablation
from headrace.cli.bench.data import Sample
from headrace.cli.bench.ladder import ONE, Rung, context_of, longest, requests, sized
from headrace.cli.bench.offline import PARAMS, run_batch
from headrace.cli.bench.plans import AblatePlan
from headrace.cli.main import main
from headrace.engine.build import build_engine
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.speculation import SpeculativeConfig

SMALL = ("--num-prompts 10 --streams 8 --input-len 12 --output-len 8 --prefix-len 32 --cache-seqs 2 --chunk 24 "
         "--sample 1 --rounds 1 --num-threads 1 --seed 3").split()  # fmt: skip
NGRAM = ["--speculative-config", '{"method": "ngram", "adaptive": false, "prompt_lookup_min": 1}']
LADDER = ["naive", "KV cache", "native kernels and tape", "int8", "int4", "static batches", "continuous, contiguous",
          "paged", "chunked prefill", "prefix cache", "KV int8", "speculation"]  # fmt: skip

Row = dict[str, Any]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command, on the built-in model with few layers."""
    path = tmp_path_factory.mktemp("ablate") / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        # Between two rungs the collector would walk torch, transformers and what pytest holds.
        patch.setattr(ablate.gc, "collect", lambda: 0)
        patch.setattr(
            sys, "argv",
            ["headrace", "bench", "ablate", str(shallow()), *SMALL, *NGRAM, "--output-json", str(path), "--json"],
        )  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    read: dict[str, Any] = json.loads(path.read_text())
    return read


# What shows that the technique of a rung is on, in that rung's row and not in the one before it.
ON: dict[str, Callable[[Row], bool]] = {
    "KV cache": lambda row: row["kv_cache"],
    "native kernels and tape": lambda row: row["library"] == "cpu",
    "int8": lambda row: row["weights"] == "int8",
    "int4": lambda row: row["weights"] == "int4",
    "static batches": lambda row: row["most_seqs"] == 2 and row["rows_per_needed"] > 1.05,
    "continuous, contiguous": lambda row: row["rows_per_needed"] == 1.0 and row["most_seqs"] == 2,
    "paged": lambda row: row["block_size"] == 16 and row["most_seqs"] > 2 and row["empty_share"] < 0.3,
    "chunked prefill": lambda row: row["chunked_prefill"] and row["longest_chunk"] <= 24,
    "prefix cache": lambda row: row["prefix_cache"] and row["num_cached_tokens"] >= 32,
    "KV int8": lambda row: row["kv_cache_dtype"] == "int8",
    "speculation": lambda row: row["speculates"] and row["num_draft_tokens"] > 0,
}


@pytest.mark.slow
def test_each_rung_has_its_technique_and_the_one_before_has_not(result: dict[str, Any]) -> None:
    rows = result["rungs"]
    assert [row["rung"] for row in rows] == LADDER
    for before, row in itertools.pairwise(rows):
        is_on = ON[row["rung"]]
        assert is_on(row), row
        assert not is_on(before), before


def test_weights_shrink_and_the_memory_of_the_cache_is_fixed(result: dict[str, Any]) -> None:
    rows = {row["rung"]: row for row in result["rungs"]}
    weights = [rows[name]["weight_bytes"] for name in ("native kernels and tape", "int8", "int4")]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 2 * weights[1] > 2 * weights[2]
    for name in LADDER[LADDER.index("static batches") :]:
        size, block = rows[name]["cache_bytes"], rows[name]["cache_bytes"] // rows[name]["num_blocks"]
        assert result["cache_bytes"] - block < size <= result["cache_bytes"], name
    assert rows["KV int8"]["num_blocks"] > 1.5 * rows["paged"]["num_blocks"]


def test_each_technique_is_left_out_alone(result: dict[str, Any]) -> None:
    whole = result["rungs"][-1]
    rows = {row["rung"]: row for row in result["without"]}
    numbers = ("kv_cache", "weights", "batching", "block_size", "chunked_prefill", "prefix_cache", "kv_cache_dtype",
               "speculates")  # fmt: skip
    changed = {name: {key for key in numbers if row[key] != whole[key]} for name, row in rows.items()}
    assert changed == {
        "nothing (control)": set(),
        # A prefix cache would keep what no KV cache may.
        "KV cache": {"kv_cache", "prefix_cache"},
        "tape": set(),
        "int4 (int8 instead)": {"weights"},
        "int4 and int8": {"weights"},
        "continuous batching": {"batching"},
        "pages": {"block_size"},
        "chunked prefill": {"chunked_prefill"},
        "prefix cache": {"prefix_cache"},
        "KV int8": {"kv_cache_dtype"},
        "speculation": {"speculates"},
    }
    assert {name for name, row in rows.items() if row["num_single_calls"]} == {"tape"}
    assert whole["num_single_calls"] == 0


def test_samples_are_marked_and_the_text_says_so(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    derived = [row["rung"] for row in result["rungs"] if row["is_derived"]]
    assert derived == LADDER[:5]
    assert result["whole_over_naive"]["factor"] > 0
    print_ablation(result)
    text = capsys.readouterr().out
    assert all(name in text for name in LADDER)
    assert "~: 1 of the requests ran" in " ".join(text.split())
    static, paged = notes(result)[2:4]
    assert "rows for each that is needed" in static
    assert "2 sequences at once, then" in paged
    assert len([line for line in markdown(result) if line.startswith("| ")]) == 2 + 12 + 11
    plot(result, tmp_path / "x.svg", "a host")
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_without_the_tape_the_answers_are_the_same_bits() -> None:
    config = EngineConfig(model=str(shallow()), max_model_len=64, num_gpu_blocks_override=16, num_threads=1)
    samples, answers = [Sample([5, 6, 7, 8], 4, 6), Sample([9, 10], 2, 5)], [list[list[int]](), list[list[int]]()]
    for is_taped in (True, False):
        with closing(build_engine(config)) as core:
            singles = [] if is_taped else runs.call_for_each(core)
            run_batch(core, samples, PARAMS, answers=answers[is_taped])
            for single in singles:
                # The prompts' step computes the rows that are read on a tape of its own, in one call.
                assert single.num_calls == 5 * len(single.nodes)
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [6, 5]


def test_tokens_behind_the_answer_are_not_counted() -> None:
    config = EngineConfig(model=str(shallow()), max_model_len=64, num_gpu_blocks_override=16, num_threads=1)
    answers = list[list[int]]()
    with closing(build_engine(config)) as core:
        [timeline] = run_batch(core, [Sample([5, 6, 7, 8], 4, 3)], PARAMS, max_tokens=9, answers=answers)
        assert core.stats().num_generated_tokens == 9
    assert (timeline.num_output_tokens, len(timeline.token_times), len(answers[0])) == (3, 3, 3)
    assert timeline.done == timeline.token_times[-1]


def test_other_answers_are_found() -> None:
    config = EngineConfig()
    rungs = [Rung("a", config), Rung("b", config), Rung("c", EngineConfig(quantization="int8"))]
    outcomes = [runs.Outcome([], 1, [[1, 2]]), runs.Outcome([], 1, [[1, 2]]), runs.Outcome([], 1, [[3]])]
    check_answers(rungs, outcomes)
    outcomes[1].answers[0][1] = 4
    with pytest.raises(HeadraceError, match="request 0 has other answers with 'a' than with 'b'"):
        check_answers(rungs, outcomes)


def test_times_of_a_pass_become_those_of_requests() -> None:
    samples = [Sample([1, 2], 2, 3), Sample([1, 2, 3], 3, 2)]
    lengths = list[int]()

    def seconds(length: int) -> float:
        lengths.append(length)
        return float(length)

    times = runs.pass_times(seconds, samples)
    assert lengths == [2, 3, 4]
    one, two = runs.uncached(times, samples, in_turn=True)
    assert one.token_times == [2, 5, 9]
    assert two.token_times == [12, 16]
    one, two = runs.uncached(times, samples, in_turn=False)
    assert one.token_times == [5, 12, 16]
    assert two.token_times == [5, 12]


def test_the_rest_of_a_sample_takes_as_long_for_each_token() -> None:
    samples = [Sample([1, 2], 2, 3), Sample([1, 2, 3, 4], 4, 2)]
    first = runs.timeline_of(samples[0], [1.0, 1.5, 2.0])
    one, two = runs.derived([first], samples)
    assert one.token_times == [1.0, 1.5, 2.0]
    assert two.token_times == [4.0, 4.5]
    assert runs.derived([first, runs.timeline_of(samples[1], [5.0, 6.0])], samples)[1].token_times == [7.0, 8.0]


def test_requests_differ_and_share_their_prefix() -> None:
    plan = AblatePlan(num_prompts=200, input_len=20, output_len=30, prefix_len=5, seed=1)
    samples = requests(plan, 100)
    assert samples == requests(plan, 100)
    assert {tuple(sample.prompt[:5]) for sample in samples} == {tuple(samples[0].prompt[:5])}
    totals = [sample.num_prompt_tokens + sample.output_len for sample in samples]
    assert max(totals) <= longest(plan) <= context_of(plan)
    assert 24 <= sum(sample.output_len for sample in samples) / 200 <= 36


def test_quick_replaces_what_is_not_set() -> None:
    plan = sized(AblatePlan(quick=True, num_prompts=3))
    assert (plan.num_prompts, plan.output_len, plan.rounds) == (3, 32, 3)
    assert sized(AblatePlan()) == AblatePlan()


def test_what_can_not_be_measured_is_refused_at_once() -> None:
    config = EngineConfig(model=str(shallow()), num_threads=1)
    with pytest.raises(RequestError, match="input_len: 20000 is not allowed.*requests have up to"):
        measure_ablation(AblatePlan(input_len=20_000), config)
    with pytest.raises(RequestError, match="backend: 'torch_ref'.*native kernels"):
        measure_ablation(AblatePlan(quick=True), EngineConfig(model=str(shallow()), backend="torch_ref"))
    medusa = SpeculativeConfig(method="medusa", model="nowhere")
    with pytest.raises(HeadraceError, match="nowhere"):
        measure_ablation(AblatePlan(quick=True), EngineConfig(model=str(shallow()), speculative_config=medusa))


def test_the_twins_of_a_gpu_run_without_graphs() -> None:
    """On a GPU the tape's place is that of CUDA graphs; their twins on a CPU are counted the same way."""
    pytest.importorskip("torch")
    config = EngineConfig(
        model=str(shallow()), backend="cuda", device="cpu", max_model_len=64, skip_tokenizer_init=True,
        num_gpu_blocks_override=16, max_num_seqs=2, max_num_batched_tokens=16,
    )  # fmt: skip
    rung = Rung("CUDA graphs", config, ONE)
    with closing(build_engine(config)) as core:
        singles = runs.call_for_each(core)
        outcome = runs.run(core, rung, [Sample([5, 6, 7, 8], 4, 2), Sample([5, 6], 2, 3)], 1)
        assert outcome.num_run == 1
        assert len(outcome.timelines) == 2
        assert singles[0].num_calls > 0


def test_there_is_no_bound_before_all_rungs_have_run_and_then_it_holds() -> None:
    bound = Bound(num_rungs=3, num_rounds=3)
    assert (bound.seconds(), bound.text()) == (None, "")
    times = [[3.0, 2.0, 50.0], [2.0, 2.0, 40.0], [3.0, 1.0, 50.0]]
    left = sum(map(sum, times))
    for number, each in enumerate(times):
        for index, seconds in enumerate(each):
            bound.note(index, seconds)
            left -= seconds
            if number == 0 and index < 2:
                assert bound.seconds() is None
                assert bound.text() == "; the slowest so far took 3 s"
            else:
                assert (bound.seconds() or 0.0) >= left
    assert (bound.seconds(), left) == (0.0, 0.0)
