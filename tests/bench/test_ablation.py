"""`python -m bench.ablation`: the section of the page, and where it goes."""

from __future__ import annotations

from typing import Any

import pytest
from bench.ablation import section, with_section


def row(name: str, **more: Any) -> dict[str, Any]:
    figures = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms"), 2.5)
    return figures | {"rung": name, "is_derived": False, "factor": 2.0, "factors": [1.5, 2.0, 2.5], "memory_bytes": 3e6,
                      "output_throughput": 1234.5, "throughputs": [1.0], "empty_share": 0.25, "most_seqs": 4,
                      "rows_per_needed": 1.5} | more  # fmt: skip


def test_the_section_has_host_commit_and_tables() -> None:
    first = row("naive", is_derived=True, factor=None, factors=[], empty_share=None, rows_per_needed=None)
    names = ("static batches", "continuous, contiguous", "paged")
    result = {"rungs": [first, *map(row, names)], "without": [row("tape", median_ttft_ms=7_200_000.0)], "rounds": 3,
              "naive": "torch_ref alone", "sample": 2, "num_prompts": 8, "total_input_tokens": 1000, "prefix_len": 4,
              "total_output_tokens": 99, "cache_bytes": 2e6, "cache_seqs": 4, "max_model_len": 64,
              "whole_over_naive": {"factor": 123.4}}  # fmt: skip
    host = {"cpu": {"cores_allowed": 2, "name": "a CPU"}}
    record = {"command": "headrace bench ablate x", "commit": "abc1234", "date": "2026-01-01", "load_before": 0.5,
              "host": host, "result": result}  # fmt: skip
    text = section(record, "x")
    assert "`headrace bench ablate x` on 2 cores of a CPU, commit abc1234, 2026-01-01, load 0.50 before" in text
    assert "| naive | ~1,234 |  |  | ~2.5 ms |" in text
    assert (
        "| paged | 1,234 | 2.00 x | 1.50 to 2.50 | 2.5 ms | 2.5 ms | 2.5 ms | 2.5 ms | 3 MB | 4 | 1.50 | 25% |" in text
    )
    assert "| tape | 1,234 | 2.00 x | 1.50 to 2.50 | 2.0 h |" in text
    assert "- The whole is 123 x as fast as the naive loop." in text
    page = "before\n<!-- ablate-x -->\nold\n<!-- end -->\n<!-- ablate-y -->\nkept\n<!-- end -->\n"
    new = with_section(page, "x", text)
    assert new == f"before\n<!-- ablate-x -->\n{text}<!-- end -->\n<!-- ablate-y -->\nkept\n<!-- end -->\n"
    with pytest.raises(ValueError, match="no lines <!-- ablate-z -->"):
        with_section(page, "z", text)
