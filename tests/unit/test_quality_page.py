"""docs/quantisation.md says what bench/results holds, and the table and the Pareto line are made right."""

from __future__ import annotations

from typing import Any

import pytest
from bench import quality
from tests.laws import rules

KEPT = sorted(path.stem.removeprefix("quality-") for path in quality.RESULTS.glob("quality-*.json"))


def row(name: str, bits: float, kl: float, **more: Any) -> dict[str, Any]:
    plain = {"kv_cache_dtype": "bfloat16", "disk_bytes": 2**20, "memory_bytes": 2**19, "perplexity": 8.08}
    plain |= {"reference_perplexity": 8.0, "mean_kl_stderr": 0.001, "top1_flip_rate": 0.25, "max_logit_difference": 2}
    layers = [{"name": "lm_head", "relative_error": 0.125}]
    return plain | {"name": name, "bits_per_weight": bits, "mean_kl": kl, "layers": layers} | more


ROWS = [row("a", 4.5, 0.2), row("b", 4.25, 0.3), row("c", 5, 0.25), row("d", 4.5, 0.1), row("e", 8, 0.01)]


def test_pareto_line() -> None:
    assert [one["name"] for one in quality.pareto(ROWS)] == ["b", "d", "e"]


def test_table() -> None:
    lines = quality.table([*ROWS, row("f", 4.25, 0.001, kv_cache_dtype="int8")]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["**e**", "c", "**d**", "a", "f", "**b**"]
    cells = "8.00 | 1.00 | 0.50 | 8.0800 | +1.00% | 10.000 ± 1.000 | 25.00% | 2.000 | lm_head 12.50%"
    assert lines[2] == f"| **e** | {cells} |"
    assert len({line.count("|") for line in lines}) == 1
    assert "decode" in quality.table([row("a", 4, 0.1, decode_tokens_per_s=1234.5)])


def test_marks() -> None:
    page = "head\n<!-- quality x -->\nold\n<!-- end of quality x -->\ntail\n"
    made = quality.marked(page, "x", "new\n")
    assert made == page.replace("old", "new")
    assert quality.marked(made, "x", "new\n") == made
    with pytest.raises(SystemExit, match="lacks the marks"):
        quality.marked(page, "y", "new\n")


def test_command_names_no_folders() -> None:
    told = quality.told_command(["builtin", "/somewhere/else/a.gguf", "--text", "../b c.txt", "--max-tokens", "9"])
    assert told == "python -m bench.quality builtin a.gguf --text 'b c.txt' --max-tokens 9"


def test_names_of_checkpoints() -> None:
    assert quality.short_name("/a/b/tiny.Q4_0.gguf", "/c/tiny") == "Q4_0 (GGUF)"
    assert quality.short_name("/a/builtin-awq-g64", "builtin") == "awq-g64"


@pytest.mark.parametrize("name", KEPT)
def test_the_page_says_what_was_measured(name: str) -> None:
    page = quality.PAGE.read_text(encoding="utf-8")
    assert quality.marked(page, name, quality.section(name)) == page, "run: python -m bench.quality --render --name"
    assert (quality.FIGURES / f"quality-{name}.svg").is_file()
    assert not rules.workplace_violations(name, (quality.RESULTS / f"quality-{name}.json").read_text())


def test_something_was_measured() -> None:
    assert "builtin" in KEPT
