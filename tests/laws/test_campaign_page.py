"""docs/reliability.md tells of the campaigns what bench/results/campaign-*.json says, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.campaigns import page


def test_the_page_quotes_the_counts_as_they_are() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.quoted(text) == page.section(), "run: python -m tests.campaigns.page"


def test_a_count_that_is_another_is_noticed(tmp_path: Path) -> None:
    one = {"steps": 1500, "violations": 0, "seed": 7, "minutes": 0.5, "examples": [], "commit": "abc"}
    pieces = [one, one | {"steps": 500, "seed": 8, "commit": "def"}]
    report = {"tier": "commit", "host": {"name": "a machine", "cores_allowed": 2}, "campaigns": {"C-1": pieces}}
    (tmp_path / "campaign-commit.json").write_text(json.dumps(report))
    made = page.written(f"before\n{page.BEGIN}\n{page.END}\nafter\n", page.section(tmp_path))
    assert "| C-1 | steps 2,000 | 0 | 7, 8 | 1.0 | abc, def |" in made
    assert page.quoted(made) == page.section(tmp_path)
    assert page.quoted(made.replace("2,000", "3,000")) != page.section(tmp_path)
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    with pytest.raises(ValueError, match="marks"):
        page.written("a page without marks", "x")
