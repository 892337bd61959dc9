"""docs/quantisation.md says what bench/results holds, and the table and the Pareto line are made right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.recipes import LEVELS
from tests.laws import rules

from bench import formats, quality
from headrace.quantize.base import method_names

ROW_OF = {"fp8": "fp8 E4M3", "fp8_e5m2": "fp8 E5M2", "llm_int8": "LLM.int8()", "qat": "fine-tuned"}
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
    text = {"text": "b.txt", "mean_kl": 0.5, "mean_kl_stderr": 0.25}
    more = quality.table(
        [row("a", 4, 0.1, texts=[text], outlier_kl=2.0, outlier_kl_stderr=0.5), row("b", 3, 0.2, texts=[text])]
    )
    assert "| KL [mnats] | KL on b.txt | KL with outliers | top-1 flips |" in more.splitlines()[0]
    assert "| 500.000 ± 250.000 | 2000.000 ± 500.000 |" in more.splitlines()[2]
    assert "| 500.000 ± 250.000 | - |" in more.splitlines()[3]
    assert len({line.count("|") for line in more.splitlines()}) == 1
    assert "decode" in quality.table([row("a", 4, 0.1, decode_tokens_per_s=1234.5)])


def test_marks() -> None:
    page = "head\n<!-- quality x -->\nold\n<!-- end of quality x -->\ntail\n"
    result = quality.marked(page, "x", "new\n")
    assert result == page.replace("old", "new")
    assert quality.marked(result, "x", "new\n") == result
    with pytest.raises(SystemExit, match="lacks the marks"):
        quality.marked(page, "y", "new\n")


def test_command_names_no_folders() -> None:
    output = quality.told_command(["builtin", "/somewhere/else/a.gguf", "--text", "../b c.txt", "--max-tokens", "9"])
    assert output == "python -m bench.quality builtin a.gguf --text 'b c.txt' --max-tokens 9"


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


@pytest.mark.parametrize("path", sorted(quality.RESULTS.glob("formats-*.json")), ids=lambda path: path.stem)
def test_the_page_says_how_fast_formats_are(path: Path) -> None:
    page = quality.PAGE.read_text(encoding="utf-8")
    assert quality.marked(page, path.stem, formats.section(path.stem)) == page, "run: python -m bench.formats --render"
    assert not rules.workplace_violations(path.stem, path.read_text())


def kept(name: str, option: str = "--made") -> dict[str, dict[str, Any]]:
    """The rows by name; skips where there is no table of that kind yet."""
    path = quality.RESULTS / f"quality-{name}.json"
    data = json.loads(path.read_text()) if path.is_file() else {"command": ""}
    if option not in data["command"]:
        pytest.skip(f"no table by python -m bench.quality {option} --name {name}")
    return {one["name"]: one for one in data["result"]}


def test_every_way_of_quantising_has_a_row() -> None:
    result = " ".join(kept("builtin"))
    for word in ("bf16", "fp16", "KV int8", *method_names(), *LEVELS, "mixed", "int3", "int2", "fine-tuned"):
        assert ROW_OF.get(word, word).lower() in result.lower(), word
    assert {name for name, _ in quality.forms()} <= kept("builtin").keys()


def test_the_order_of_the_rows() -> None:
    """GPTQ and AWQ lose less than rounding, fine-tuned weights at 2 bits the least; more bits lose less; int8 is within
    0.3% of bf16."""
    rows = kept("builtin")
    kl = {name: one["mean_kl"] for name, one in rows.items()}
    for bits in (4, 3):
        least = kl[f"rtn int{bits}-g64"] - 3 * rows[f"rtn int{bits}-g64"]["mean_kl_stderr"]
        assert kl[f"gptq int{bits}-g64"] < least
        assert kl[f"awq int{bits}-g64-asym"] < least
    for bits, form in ((4, ""), (3, ""), (2, "-asym")):
        assert kl[f"fine-tuned int{bits}-g64{form}"] < kl[f"rtn int{bits}-g64{form}"] / 2
    assert kl["fine-tuned int2-g64-asym"] < kl["gptq int2-g64-asym"] / 2
    assert kl["bf16"] < kl["int8"] < kl["int6"] < kl["int4"] < kl["rtn int3-g64"] < kl["rtn int2-g64-asym"]
    assert kl["Q8_0 (GGUF)"] < kl["Q6_K (GGUF)"] < kl["Q5_K_M (GGUF)"] < kl["Q4_K_M (GGUF)"] < kl["Q3_K_M (GGUF)"]
    change = rows["int8"]["perplexity"] / rows["bf16"]["perplexity"] - 1
    assert abs(change) < 3e-3


def test_outliers_cost_the_weights_alone() -> None:
    """What int8 weights lose with planted outliers, and that methods made against them lose nothing."""
    rows = kept("builtin", "--outliers")
    loss = {name: one["outlier_kl"] for name, one in rows.items() if "outlier_kl" in one}
    assert len(loss) > 40
    assert all(loss[name] < 0.015 for name in ("int8", "int8-g128", "rtn W8A8", "Q8_0 (GGUF)", "gptq int8"))
    for name in ("bf16", "fp8 E4M3", "smoothquant W8A8", "LLM.int8() (bitsandbytes)"):
        assert loss[name] < 1.05 * rows[name]["mean_kl"], name


def test_int8_on_a_long_text() -> None:
    """Beside bf16, token by token: what is said of 0.1% is more than two standard errors away from it."""
    rows = kept("builtin-int8")
    assert abs(rows["gptq int8"]["loss_change"]) < 1e-3
    for name in ("Q8_0 (GGUF)", "LLM.int8() (bitsandbytes)"):
        assert abs(rows[name]["loss_change"]) + 2 * rows[name]["loss_change_stderr"] < 1e-3, name
    for name in ("int8", "int8-g128", "rtn W8A8", "smoothquant W8A8"):
        assert abs(rows[name]["loss_change"]) + 2 * rows[name]["loss_change_stderr"] < 1.5e-3, name
