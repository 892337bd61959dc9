"""`headrace verify` and `headrace bench speculate`: verdicts, statistics and texts, each seen to fail where it must."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import verify
from headrace.cli.bench import speculate
from headrace.cli.bench.plans import SpeculatePlan
from headrace.cli.bench.speculate import Synthetic, measure_speculation, print_speculation, read_prompts
from headrace.cli.verify import ComparedOutput, VerifyPlan, chi_square, examine, num_different
from headrace.drafters.base import Context
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig

SPEC = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_model_len": 256, "num_threads": 1, "max_num_seqs": 16}


def draws(chances: dict[tuple[int, ...], float], num: int, seed: int) -> Counter[tuple[int, ...]]:
    return Counter(random.Random(seed).choices(list(chances), list(chances.values()), k=num))


def test_exact_draws_pass_and_a_bias_of_two_percent_is_caught() -> None:
    exact = {(i, j): (i + 1) * (j + 1) / 100 for i in range(4) for j in range(4)}
    assert min(chi_square(draws(exact, 50_000, seed), exact, 50_000) for seed in range(5)) > 0.01
    biased = dict(exact)
    biased[3, 3] += 0.02
    biased[0, 0], biased[0, 1] = biased[0, 0] / 2, max(0.0, biased[0, 1] - 0.015)
    assert chi_square(draws(biased, 50_000, 1), exact, 50_000) < verify.LEAST_P
    # What can not come at all.
    assert chi_square(Counter({(9, 9): 1}) + draws(exact, 999, 1), exact, 1000) == 0.0


def test_one_wrong_bit_is_a_difference() -> None:
    a, b = ComparedOutput([1, 2], b"\x00\x01"), ComparedOutput([1, 2], b"\x00\x00")
    assert num_different([a, a, a], [a, b, ComparedOutput([1, 3], b"\x00\x01")]) == 2


def test_the_built_in_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = VerifyPlan(num_prompts=3, max_tokens=12, num_samples=150)
    result = examine(plan, EngineConfig(max_logprobs=-1, speculative_config=SPEC, **SMALL))
    assert result["passed"], result
    assert (result["num_compared"], result["num_different"]) == (18, 0)
    verify.show(result)
    assert "PASSED" in capsys.readouterr().out
    verify.show(result | {"passed": False, "num_different": 1})
    verify.show(result | {"passed": False, "num_drafts": 0})
    assert capsys.readouterr().out.count("FAILED") == 2


def test_where_nothing_is_guessed_nothing_is_proven() -> None:
    never = SpeculativeConfig(method="ngram", prompt_lookup_min=64, prompt_lookup_max=64)
    plan = VerifyPlan(num_prompts=1, max_tokens=4, num_samples=0)
    result = examine(plan, EngineConfig(max_logprobs=-1, speculative_config=never, **SMALL))
    assert not result["passed"]
    assert result["num_different"] == 0


def test_a_synthetic_drafter_is_right_as_often_as_it_was_told() -> None:
    drafter = Synthetic(0.8, 100)
    prompt, answer = [1, 2, 3], [*range(10, 90)]
    drafter.record(prompt, answer)
    right = total = 0
    for place in range(70):
        known = [*prompt, *answer[:place]]
        [draft] = drafter.propose([Context(7, known, 3, SamplingParams(), 4, 4)])
        pairs = list(zip(draft.token_ids, answer[place : place + 4], strict=True))
        right, total = right + sum(a == b for a, b in pairs), total + len(pairs)
    assert abs(right / total - 0.8) < 0.08
    [draft] = drafter.propose([Context(8, [5, 6], 2, SamplingParams(), 4, 4)])
    assert draft.token_ids == []


def test_the_bench_compares_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    plan = SpeculatePlan(load=[2], texts="edit", output_len=24, rounds=1, num_prompts=2, control=True)
    result = measure_speculation(plan, EngineConfig(speculative_config=SPEC, **SMALL))
    [row] = result["loads"]
    assert row["num_different"] == 0
    assert row["ratio"] > 0
    assert row["control_ratios"] == [row["control_ratio"]]
    assert row["control_ratio"] not in (0, row["ratio"])
    [counted] = result["acceptance"]
    assert counted["mean_accepted_length"] == 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
    assert counted["num_accepted_tokens"] > 0
    print_speculation(result | {"model_id": "builtin"})
    printed = capsys.readouterr().out
    assert "coupled" in printed
    assert f"{row['control_ratio']:.2f}\n" in printed


def test_alpha_takes_the_place_of_a_drafter() -> None:
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive=False)
    plan = SpeculatePlan(alpha=1.0, texts="builtin", output_len=26, rounds=1, num_prompts=1)
    result = measure_speculation(plan, EngineConfig(speculative_config=spec, **SMALL))
    [counted] = result["acceptance"]
    assert counted["mean_accepted_length"] > 4.5
    assert counted["formula"] > 4.5
    with pytest.raises(RequestError, match="temperature"):
        measure_speculation(SpeculatePlan(alpha=0.5, temperature=[1.0]), EngineConfig(**SMALL))
    with pytest.raises(RequestError, match="speculative_config"):
        measure_speculation(SpeculatePlan(), EngineConfig(**SMALL))


def test_prompts_of_known_layouts_are_read(tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text(json.dumps({"turns": ["first", "second"]}) + "\n\n" + json.dumps([1]))
    (tmp_path / "human.jsonl.gz").write_bytes(gzip.compress(json.dumps({"prompt": "def f():"}).encode()))
    assert read_prompts(tmp_path) == ["def f():", "first"]
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(RequestError, match="a readable file of JSON lines"):
        read_prompts(tmp_path / "bad.jsonl")
    with pytest.raises(RequestError, match="no/such"):
        read_prompts(tmp_path / "no/such")


def test_echoes_repeat_their_prompt() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    letters: Any = Letters()
    for kind in ("edit", "summary"):
        for prompt, answer in speculate.echoes(letters, kind, 3, 200, 150):
            assert answer is not None
            assert len(answer) == 150
            output = "".join(map(chr, prompt))
            assert sum("".join(map(chr, answer[i : i + 8])) in output for i in range(142)) > 80


def test_the_tables_of_all_drafters() -> None:
    from bench.plot import pooled_position
    from bench.speculation import pooled, tables

    def counted(mode: str, drafts: int, counts: list[int]) -> dict[str, Any]:
        return {
            "mode": mode, "temperature": 0.0, "num_drafts": drafts, "num_accepted_tokens": sum(counts),
            "acceptance_per_position": [each / drafts for each in counts],
            "mean_accepted_length": 1 + sum(counts) / drafts, "formula": 1.5,
        }  # fmt: skip

    rows = [
        {"method": "mtp", "texts": "a", "speed": {"ratio": 1.25}, "acceptance": [counted("coupled", 10, [6, 3])]},
        {"method": "mtp", "texts": "b", "speed": {"ratio": 0.5}, "acceptance": [counted("coupled", 30, [9])]},
    ]
    assert pooled(rows, "mtp", "coupled", 0.0) == 1 + 18 / 40
    assert pooled(rows, "mtp", "rejection", 0.0) is None
    assert [pooled_position(rows, "mtp", place) for place in range(3)] == [15 / 40, 3 / 40, None]
    result = "\n".join(tables(rows))
    assert "| `mtp` | 1.90 (1.50), 1.25 | 1.30 (1.50), 0.50 |" in result
    assert "| `mtp` | 1.45 | – |" in result
