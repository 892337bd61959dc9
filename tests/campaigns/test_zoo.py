"""`tests.campaigns.zoo` with a few cases: it tells right from wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.campaigns import zoo

BASE = zoo.Case("base", {})


def test_a_right_checkpoint_is_right(tmp_path: Path) -> None:
    assert zoo.run("qwen3", BASE, tmp_path / "m") == zoo.Outcome("base", "right")


def test_control_a_changed_weight_is_wrong(tmp_path: Path) -> None:
    """Negative control."""
    assert zoo.run("qwen3", BASE, tmp_path / "m", damage=True).kind == "wrong"


def test_a_config_that_headrace_refuses_has_its_reason(tmp_path: Path) -> None:
    outcome = zoo.run("gpt2", zoo.Case("cross", {"add_cross_attention": True}), tmp_path / "m")
    assert outcome.kind == "refused"
    assert "add_cross_attention is true" in outcome.why


def test_a_config_that_transformers_cannot_make_is_no_fault(tmp_path: Path) -> None:
    assert zoo.run("llama", zoo.Case("none", {"num_attention_heads": 0}), tmp_path / "m").kind == "unmade"


def test_a_type_that_is_not_run_is_refused_by_name(tmp_path: Path) -> None:
    assert zoo.refused("mamba", tmp_path / "m").kind == "refused"


def test_every_type_has_its_cases() -> None:
    names = [case.name for case in zoo.cases("mistral")]
    assert len(names) == len(set(names))
    assert {"sliding_window=7", "tokenizer.model, shards", "tie_word_embeddings=True"} <= set(names)
    assert {"mamba", "kimi_k2", "llama"} <= set(zoo.types())


def test_refusals_are_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        zoo.Outcome("a", "refused", "x is 1, expected 2"),
        zoo.Outcome("b", "refused", "x is 3, expected 4"),
        zoo.Outcome("c", "wrong", "token 0"),
    ]
    report = zoo.summary({"llama": outcomes, "mamba": [zoo.Outcome("config.json alone", "refused")]})
    assert report["counts"] == {"refused": 2, "wrong": 1}
    assert report["refused"] == {"x is …, expected …": 2}
    assert report["bad"] == [["llama", "c", "wrong", "token 0"]]
    zoo.show(report)
    assert "1 types, 1 refused by name" in capsys.readouterr().out
