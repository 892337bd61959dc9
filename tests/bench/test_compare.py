"""The pure parts of `bench.compare`: shapes and their costs, the plan, medians and ratios, the table, the protocol."""

from __future__ import annotations

import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from bench.compare import figures, limits, plan, report
from bench.compare.environments import OURS, PEERS
from bench.compare.plan import FASTEST, FULL, OURS4, OURS8, QUICK, WORKS, Contender, Turn
from bench.compare.shapes import SHAPES, Shape, byte_letters, write_checkpoint, write_tokenizer
from bench.peers.protocol import NUM_NEW, NUM_PROMPT
from rich.console import Console

L1B, Q06 = SHAPES["l1b"], SHAPES["q06"]
TINY = Shape("tiny", "nothing", "Qwen3ForCausalLM", "qwen3", 2, 32, 4, 2, 16, 48, 320, 1e4, 1e-6, 64, True)
PEER4, PEER8 = Contender("onnxruntime-genai", "int4"), Contender("openvino-genai", "int8")


def sample(contender: Contender, work: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "shape": "l1b", "work": work, "peer": contender.peer, "quant": contender.quant, "round": 0, "value": value,
        "foreign": 0.01, **more,
    }  # fmt: skip


LIMITS = {"work": "limits", "bandwidth": 24.0, "int8": 1.2, "foreign": 0.0}


# -- shapes ------------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_models() -> None:
    assert L1B.layer_weights == 973_078_528
    assert L1B.head_weights == 128_256 * 2048
    assert 2 * sum_of_sizes(L1B) == 2_471_628_800, "bytes of Llama-3.2-1B in bf16"
    assert 2 * sum_of_sizes(Q06) == 1_192_099_840, "bytes of Qwen3-0.6B in bf16"


def sum_of_sizes(shape: Shape) -> int:
    total = 0
    for _, size in shape.tensors():
        product = 1
        for width in size:
            product *= width
        total += product
    return total


def test_weight_bytes_count_codes_and_scales() -> None:
    both = L1B.layer_weights + L1B.head_weights
    assert L1B.weight_bytes(4, 64) == both // 2 + both // 64 * 2
    assert L1B.weight_bytes(4, 64, 0, 32) - L1B.weight_bytes(4, 64) == L1B.head_weights // 64 * 2
    assert L1B.weight_bytes(16, 0) == 2 * both
    rows = L1B.vocab + L1B.layers * sum(size[0] for size in L1B.matrices.values())
    assert L1B.weight_bytes(8, 0) == both + 2 * rows
    assert L1B.weight_bytes(8, 0, 16) == both + L1B.head_weights + 2 * (rows - L1B.vocab)


def test_cache_bytes_and_operations() -> None:
    assert L1B.kv_bytes("float16") == 16 * 2 * 8 * 64 * 2
    assert L1B.kv_bytes("int8") == 16 * 2 * 8 * (64 + 4)
    assert L1B.operations(512, 1) == 2 * (512 * L1B.layer_weights + L1B.head_weights)


def test_a_checkpoint_is_one_that_headrace_reads(tmp_path: Path) -> None:
    """Written to the byte: the header's offsets end where the file does, and the engine makes tokens from it."""
    from headrace import LLM, SamplingParams

    write_checkpoint(TINY, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_") == len(data) - 8 - length
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, kv_cache_memory_bytes=2**20)
    [output] = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), use_tqdm=False)
    llm.close()
    assert len(output.outputs[0].token_ids) == 3


def test_a_second_seed_gives_other_weights(tmp_path: Path) -> None:
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        write_checkpoint(TINY, tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_tokenizer_has_a_word_for_every_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_checkpoint(TINY, tmp_path / "plain")
    write_tokenizer(TINY, tmp_path / "plain", tmp_path / "both")
    write_tokenizer(TINY, tmp_path / "plain", tmp_path / "both")  # again over itself
    assert (tmp_path / "both" / "model.safetensors").read_bytes()
    tokenizer = Tokenizer.from_file(str(tmp_path / "both" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab
    assert tokenizer.id_to_token(257) == "<|eos|>"
    assert tokenizer.id_to_token(319) == "t319"
    assert tokenizer.decode(tokenizer.encode("héllo w").ids) == "héllo w"


def test_byte_letters_are_all_different() -> None:
    assert len(set(byte_letters())) == 256
    assert byte_letters()[ord("a")] == "a"
    assert byte_letters()[ord(" ")] == "Ġ"


# -- plan --------------------------------------------------------------------------------------------------------


def test_everybody_in_the_tables_exists() -> None:
    for tables in (FULL, FASTEST, QUICK):
        for shape, works in tables.items():
            assert shape in SHAPES
            for work, who in works.items():
                assert work in WORKS
                assert all(c.quant in PEERS[c.peer].quants and c.bits for c in who)
                assert any(c.ours for c in who), (shape, work)
    for shape, goals in figures.GOALS.items():
        assert {goal.work for goal in goals} <= FULL[shape].keys()
        requests = {goal.work for goal in goals if goal.ratio or goal.share or goal.bound is not None}
        assert requests - {"context"} <= QUICK[shape].keys(), "a quick run has every row that asks for something"


def test_a_plan_is_interleaved_and_begins_elsewhere_each_round() -> None:
    a, b = PEER4, OURS4
    who = {("l1b", "decode"): (a, b), ("l1b", "batch8"): (b,), ("q06", "decode"): (a,)}
    rounds = {"decode": 2, "batch8": 1}
    together = list(plan.turns(who, rounds.__getitem__, shapes_apart=False))
    assert together == [
        [Turn(0, "l1b", "decode", a), Turn(0, "l1b", "decode", b), Turn(0, "l1b", "batch8", b),
         Turn(0, "q06", "decode", a)],
        [Turn(1, "l1b", "decode", b), Turn(1, "l1b", "decode", a), Turn(1, "q06", "decode", a)],
    ]  # fmt: skip
    apart = list(plan.turns(who, rounds.__getitem__, shapes_apart=True))
    assert [{turn.shape for turn in turns} for turns in apart] == [{"l1b"}, {"l1b"}, {"q06"}, {"q06"}]
    flat = [sorted(repr(turn) for turns in all_ for turn in turns) for all_ in (apart, together)]
    assert flat[0] == flat[1]
    assert list(plan.turns({}, rounds.__getitem__, shapes_apart=False)) == []


def test_contenders_are_those_asked_for() -> None:
    contenders = plan.contenders(FULL, ["q06"], ["decode", "prefix"], [OURS, "ctranslate2"])
    assert contenders == {("q06", "decode"): (Contender("ctranslate2", "int8"), OURS4, OURS8)}


def test_the_process_needed_last_goes_first() -> None:
    coming = [Turn(0, "l1b", work, c) for work in ("decode", "prefix") for c in (PEER4, OURS4)]
    uses = [plan.next_use(turn.worker, coming) for turn in coming]
    assert uses == [0, 1, 2, 3], "the prefix work has processes of its own"
    assert plan.next_use(Turn(0, "q06", "decode", OURS4).worker, coming) > 3


def test_hopeless_is_slow_and_long() -> None:
    assert plan.hopeless(5, 10, 60, True)
    assert not plan.hopeless(7, 10, 60, True)
    assert not plan.hopeless(5, 10, 2, True), "it costs nothing to be sure"
    assert plan.hopeless(10, 5, 60, False)
    assert not plan.hopeless(5, 10, 60, False)


# -- figures -----------------------------------------------------------------------------------------------------


def test_medians_are_of_undisturbed_samples_the_best_first() -> None:
    samples = [
        *(sample(PEER4, "decode", value, round=i) for i, value in enumerate((18.0, 20.0, 19.0))),
        sample(PEER4, "decode", 90.0, foreign=0.05),
        sample(OURS4, "decode", 29.0, foreign=0.03),
        sample(OURS4, "batch8", 500.0),
    ]
    best, second = figures.figures(samples, "l1b", "decode")
    assert (best.contender, best.value, best.count) == (OURS4, 29.0, 1)
    assert (second.value, second.count, second.low, second.high) == (19.0, 3, 18.0, 20.0)
    assert figures.figures(samples, "q06", "decode") == []
    peer, ours, _ = figures.tallies(samples, "l1b")
    assert (peer.num_samples, peer.num_disturbed, ours.num_disturbed) == (4, 1, 0)
    samples[3]["foreign"] = 0.04
    assert figures.figures(samples, "l1b", "decode")[0].value == 29.0
    assert figures.figures(samples, "l1b", "decode")[1].value == 19.5, "undisturbed, the same sample counts"


@pytest.mark.parametrize("contender", [PEER4, OURS4])
def test_a_contender_with_disturbed_samples_alone_has_no_figure(contender: Contender) -> None:
    samples = [LIMITS, sample(PEER4, "decode", 20.0), sample(OURS4, "decode", 40.0, weight_bytes=700_000_000)]
    assert rows_of(samples)["decode, one stream, int4"].met is True
    for entry in samples[1:]:
        entry["foreign"] = 0.5 if entry["peer"] == contender.peer else 0.0
    row = rows_of(samples)["decode, one stream, int4"]
    assert (row.peer is None, row.ours is None) == (contender is PEER4, contender is OURS4)
    assert (row.ratio, row.met, row.disturbed) == (None, None, (contender,))
    assert report.verdict(row) == "disturbed"


def test_a_disturbed_peer_may_be_the_best_one() -> None:
    """The ratio to another peer is then no success, but it can be a failure: a faster peer only lowers it."""
    other = Contender("llama-cpp-python", "Q4_0")
    samples = [
        LIMITS | {"int8": 0.2},
        sample(PEER4, "batch8", 20.0),
        sample(other, "batch8", 1.0, foreign=0.3),
        sample(OURS4, "batch8", 50.0),
    ]
    row = rows_of(samples)["8 streams of 128 + 128"]
    assert (row.ratio, row.met, row.disturbed) == (2.5, None, (other,))
    samples[-1]["value"] = 30.0
    row = rows_of(samples)["8 streams of 128 + 128"]
    assert (row.ratio, row.met) == (1.5, False)


def test_ratios_are_those_of_pairs_within_a_round() -> None:
    """The machine is 2 times as fast in the second round and 3 times in the third; one sample is disturbed."""
    samples = [sample(OURS4, "batch8", 2.0 * speed, round=i) for i, speed in enumerate((10, 20, 30))]
    samples += [sample(PEER4, "batch8", 1.0 * speed, round=i) for i, speed in enumerate((10, 20, 30))]
    samples[3]["foreign"] = 0.5
    assert figures.paired(samples, "l1b", ("batch8", OURS4), ("batch8", PEER4)) == [2.0, 2.0]
    row = rows_of(samples)["8 streams of 128 + 128"]
    assert (row.ratio, row.num_pairs) == (2.0, 2)
    assert row.ours is not None
    assert row.peer is not None
    assert row.ours.value / row.peer.value == 20 * 2 / 25, "the ratio of the medians is another"
    slow = [sample(OURS4, "first_token", 1.0, round=0), sample(PEER4, "first_token", 2.0, round=0)]
    assert figures.paired(slow, "l1b", ("first_token", OURS4), ("first_token", PEER4)) == [2.0], (
        "seconds: less is better"
    )
    apart = [sample(OURS4, "batch8", 30.0, round=0), sample(PEER4, "batch8", 20.0, round=1)]
    row = rows_of(apart)["8 streams of 128 + 128"]
    assert (row.ratio, row.num_pairs) == (1.5, 0)


def rows_of(samples: list[dict[str, Any]]) -> dict[str, figures.Row]:
    return {row.goal.label: row for row in figures.rows(L1B, samples)}


def test_decode_is_compared_with_peers_of_as_many_bits() -> None:
    size = 700_000_000
    samples: list[dict[str, Any]] = [
        LIMITS,
        sample(PEER4, "decode", 20.0, weight_bytes=738 << 20),
        sample(PEER8, "decode", 14.0),
        sample(OURS4, "decode", 30.0, weight_bytes=size),
        sample(OURS8, "decode", 17.0),
    ]
    four, eight = (rows_of(samples)[f"decode, one stream, int{bits}"] for bits in (4, 8))
    assert four.ratio == pytest.approx(1.5)
    assert four.share == pytest.approx(size * 30 / 24e9)
    assert four.limit == "bandwidth"
    assert four.met is False, "87.5% is under the 88% that are wanted"
    assert "peer's file has 738" in four.note
    assert eight.ratio == pytest.approx(17 / 14)
    assert eight.met is False
    samples[-2]["value"] = 31.0
    assert rows_of(samples)["decode, one stream, int4"].met is True


def test_prefill_and_batches_against_the_integer_peak() -> None:
    samples = [LIMITS, sample(PEER8, "prefill512", 200.0), sample(OURS4, "prefill512", 400.0)]
    samples += [sample(OURS4, "batch8", 120.0), sample(OURS8, "batch8", 130.0)]
    result = rows_of(samples)
    prefill = result["prefill 512"]
    assert prefill.share == pytest.approx(2 * (L1B.layer_weights + L1B.head_weights / 512) * 400 / 1.2e12)
    assert prefill.ratio == 2.0
    batch = result["8 streams of 128 + 128"]
    assert batch.ours is not None
    assert batch.ours.contender == OURS8, "the best of ours counts"
    rows = NUM_PROMPT + NUM_NEW - 1
    each = 2 * (rows * L1B.layer_weights + NUM_NEW * L1B.head_weights) / NUM_NEW
    assert batch.share == pytest.approx(each * 130 / 1.2e12)
    assert batch.met is False, "half of the peak is too little, whatever a peer has"


def test_rows_that_are_about_headrace_alone() -> None:
    size = 700_000_000
    samples = [
        LIMITS,
        sample(OURS4, "step8", 1.4),
        sample(OURS4, "context", 20.0, weight_bytes=size),
        sample(OURS4, "prefix", 70.0),
        sample(PEER4, "prefix", 48.0),
        sample(OURS4, "batch32", 180.0),
        sample(OURS4, "serve", 175.0),
        sample(OURS4, "first_token", 1.3),
        sample(PEER4, "first_token", 0.9),
        sample(OURS4, "memory", 900.0, weight_bytes=size),
    ]
    result = {row.goal.work: row for row in figures.rows(L1B, samples)}
    assert result["step8"].met is True
    context = result["context"]
    assert context.share == pytest.approx((size + (16384 + 32) * L1B.kv_bytes("int8")) * 20 / 24e9)
    assert context.met is True
    assert result["prefix"].met is True
    assert result["serve"].ratio == pytest.approx(175 / 180)
    assert result["serve"].met is True
    assert result["first_token"].met is False
    assert result["first_token"].ratio == pytest.approx(0.9 / 1.3)
    most = (size + 1024 * L1B.kv_bytes("float32") + 350e6) / 2**20
    assert result["memory"].met is (most >= 900)
    assert figures.memory_bound(L1B, result["memory"].ours) == pytest.approx(most)  # type: ignore[arg-type]
    assert result["prefill512"].met is None
    without = [s for s in samples if s["work"] != "batch32"]
    assert {row.goal.work: row for row in figures.rows(L1B, without)}["serve"].met is None


def test_without_limits_there_are_no_shares() -> None:
    samples = [
        {"work": "limits", "error": "no native core"},
        sample(PEER4, "decode", 10.0),
        sample(OURS4, "decode", 20.0),
    ]
    [row] = [row for row in figures.rows(L1B, samples) if row.goal.bits == 4]
    assert (row.share, row.met) == (None, None), "one half of the goal could not be judged"
    assert figures.limit(samples, "bandwidth") is None


def test_a_disturbed_limit_does_not_count() -> None:
    samples = [{"work": "limits", "bandwidth": b, "foreign": f} for b, f in ((20.0, 0.0), (24.0, 0.01), (9.0, 0.5))]
    assert figures.limit(samples, "bandwidth") == 22.0
    assert figures.limit([{**s, "foreign": 0.5} for s in samples], "bandwidth") == 24.0


def test_failures_are_those_that_never_came_good() -> None:
    samples = [
        {"shape": "l1b", "work": "decode", "peer": "vllm", "quant": "w8a8", "error": "boom"},
        {"shape": "l1b", "work": "decode", **{"peer": PEER4.peer, "quant": PEER4.quant}, "error": "once"},
        sample(PEER4, "decode", 1.0),
        {"work": "limits", "error": "no native core"},
    ]
    assert figures.failures(samples, "l1b") == [("vllm w8a8", "decode", "boom")]


def test_limits_are_the_best_of_the_isas() -> None:
    rows = [
        {"what": "read", "isa": "scalar", "rate": 20e9},
        {"what": "read", "isa": "avx2", "rate": 23e9},
        {"what": "int8", "isa": "scalar", "rate": 0.1e12},
        {"what": "f32", "isa": "avx2", "rate": 3e11},
    ]
    assert limits.best_rates(rows) == {"bandwidth": 23.0, "int8": 0.1}
    assert "error" in limits.best_rates(rows[:2])
    assert limits.best_rates({"error": "why"}) == {"error": "why"}


# -- report ------------------------------------------------------------------------------------------------------


def printed(samples: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    report.show(Console(file=out, width=220), L1B, samples, "here")
    return out.getvalue()


def test_the_table_tells_figures_ratios_and_failures() -> None:
    samples = [
        LIMITS,
        sample(PEER4, "decode", 20.0),
        sample(OURS4, "decode", 30.0),
        sample(OURS4, "decode", 10.0, foreign=0.2),
        sample(PEER8, "decode", 11.0, foreign=0.2),
        {"shape": "l1b", "work": "decode", "peer": "vllm", "quant": "w8a8", "error": "no [wheel]"},
    ]
    text = printed(samples)
    [line] = [line for line in text.splitlines() if "decode, one stream, int4" in line]
    for part in ("onnxruntime-genai int4 20.0 tok/s", "int4 30.0 tok/s", "1.50×", "≥ 1.5×", "≥ 90% of bandwidth"):
        assert part in line
    assert "not measured" in next(line for line in text.splitlines() if "prefill 512" in line)
    assert "failed: vllm w8a8 at decode: no [wheel]" in text
    assert "limit, bandwidth: 24 GB/s read" in text
    assert "20.0 (n=1) " in text
    assert "30.0 (n=1) " in text
    counts = {
        line.split("│")[1].strip(): line.split("│")[-2].strip()
        for line in text.splitlines()
        if re.search(r"\d of \d+ │$", line)
    }
    assert counts["headrace int4"] == "1 of 2"
    assert counts["openvino-genai int8"] == "1 of 1"
    [line] = [line for line in text.splitlines() if "decode, one stream, int8" in line]
    assert "disturbed: openvino-genai int8" in line
    assert "11.0" not in text, "a disturbed sample is no figure"


def test_numbers_keep_three_digits() -> None:
    assert report.number(1234.6, "MiB") == "1,235 MiB"
    assert report.number(0.6312, "s") == "0.63 s"
    assert report.number(19.57, "tok/s") == "19.6 tok/s"
    assert report.number(376.1, "tok/s") == "376 tok/s"


def test_json_keeps_rows_and_the_samples_of_its_shape() -> None:
    other = {**sample(OURS4, "decode", 60.0), "shape": "q06"}
    record = report.as_json(
        L1B,
        [
            {"work": "run", "head": {}},
            LIMITS,
            sample(OURS4, "decode", 30.0),
            sample(OURS4, "decode", 1.0, foreign=1),
            other,
        ],
        {"commit": "c"},
    )
    again = json.loads(json.dumps(record))
    assert again["commit"] == "c"
    assert again["limits"] == {"bandwidth": 24.0, "int8": 1.2}
    assert [s["work"] for s in again["samples"]] == ["limits", "decode", "decode"]
    assert again["disturbed"] == [
        {"contender": "headrace int4", "work": "decode", "num_samples": 2, "num_disturbed": 1}
    ]
    assert again["rows"][0]["ours"]["contender"] == "headrace int4"
    assert again["rows"][0]["peer"] is None
    assert len(again["rows"]) == len(figures.GOALS["l1b"])


def test_a_plot_is_the_same_for_the_same_samples(tmp_path: Path) -> None:
    samples = [LIMITS, sample(PEER4, "decode", 20.0), sample(OURS4, "decode", 30.0), sample(OURS4, "batch8", 100.0)]
    pictures = []
    for _ in range(2):
        assert report.plot(L1B, samples, "here", tmp_path / "a.svg")
        pictures.append((tmp_path / "a.svg").read_bytes())
    assert pictures[0] == pictures[1]
    assert not report.plot(Q06, samples, "here", tmp_path / "b.svg")
