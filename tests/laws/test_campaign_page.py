"""docs/reliability.md tells of the campaigns what bench/results/campaign-*.json says, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.campaigns import page
from tests.campaigns.__main__ import keep

ONE, OTHER = {"name": "a machine", "cores_allowed": 2}, {"name": "another one", "cores_allowed": 4}


def test_the_page_quotes_the_counts_as_they_are() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.quoted(text) == page.section(), "run: python -m tests.campaigns.page"


def test_a_count_that_is_another_is_noticed(tmp_path: Path) -> None:
    one = {"steps": 1500, "violations": 0, "seed": 7, "minutes": 0.5, "examples": [], "commit": "abc", "host": ONE}
    pieces = [one, one | {"steps": 500, "seed": 8, "commit": "def"}]
    report = {"tier": "commit", "campaigns": {"C-1": pieces}}
    (tmp_path / "campaign-commit.json").write_text(json.dumps(report))
    result = page.written(f"before\n{page.BEGIN}\n{page.END}\nafter\n", page.section(tmp_path))
    assert "| C-1 | steps 2,000 | 0 | 7, 8 | 1.0 | abc, def | a machine, 2 cores |" in result
    assert page.quoted(result) == page.section(tmp_path)
    assert page.quoted(result.replace("2,000", "3,000")) != page.section(tmp_path)
    assert result.startswith("before\n")
    assert result.endswith("after\n")
    with pytest.raises(ValueError, match="marks"):
        page.written("a page without marks", "x")


def test_pieces_are_told_as_one() -> None:
    pieces = [{"seed": seed, "steps": 500, "most_at_once": 256, "p": 5.0386e-30} for seed in (1, 2, 3, 9)]
    assert page.summed(pieces) == {"seed": 15, "steps": 2000, "most_at_once": 256, "p": 5.0386e-30}
    assert page.ranges([9, 2, 1, 3]) == "1 to 3, 9"
    assert page.ranges([4, 5]) == "4, 5"
    assert sorted(["C-11", "C-2", "C-8-long", "C-8"], key=page.in_order) == ["C-2", "C-8", "C-8-long", "C-11"]
    assert [page.number(each) for each in (2_000_000, 5.0386e-30, 1312.43)] == ["2,000,000", "5.039e-30", "1,312.43"]


def test_each_row_keeps_the_host_and_commit_of_its_own_run(tmp_path: Path) -> None:
    """Also of files that have one host for all, which was that of the last run."""
    out = tmp_path / "campaign-commit.json"
    first = {"steps": 5, "violations": 0, "seed": 0, "minutes": 0.5, "commit": "abc"}
    older = {"C-1": [first], "C-2": [first]}
    out.write_text(json.dumps({"tier": "commit", "host": ONE | {"features": ["avx2"]}, "campaigns": older}))
    again = {"seed": 0, "commit": "def", "host": OTHER}
    keep(out, "commit", "C-2", first | again, add=False)
    keep(out, "commit", "C-1", first | again | {"seed": 1}, add=True)
    result = page.section(tmp_path)
    assert "| C-1 | steps 10 | 0 | 0, 1 | 1.0 | abc, def | a machine, 2 cores; another one, 4 cores |" in result
    assert "| C-2 | steps 5 | 0 | 0 | 0.5 | def | another one, 4 cores |" in result
    assert "host" not in json.loads(out.read_text())
