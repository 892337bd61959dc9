"""Each row that is passed has a removal that applies, and the judge notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.campaigns.removal import Removal
from tests.campaigns.rows import PAGES, REMOVALS, ROOT, Copy, Row, faults, rows, verdict

ALL = [row for page in PAGES for row in rows((ROOT / page).read_text(encoding="utf-8"))]


def test_every_passed_row_has_a_removal_that_applies() -> None:
    assert len(ALL) > 60
    assert faults(ALL, REMOVALS) == []


def test_a_row_without_a_removal_is_noticed() -> None:
    first = REMOVALS[0]
    row = next(row for row in ALL if row.name == first.row)
    assert faults([row], []) == [f"{row.name}: no removal"]
    assert faults([row], [first._replace(original="nowhere")])[0].startswith(f"{row.name}: {first.file} has 0 times")
    assert faults([row], [first._replace(replacement=first.original)]) == [f"{row.name}: nothing is removed"]
    assert faults([row], [first._replace(test="core/test_fair.py")]) == [
        f"{row.name}: the row does not name core/test_fair.py"
    ]
    assert faults([row._replace(state="not applicable")], []) == []


class Folder(Copy):
    """A folder with one file, whose test is a condition on its text."""

    def __init__(self, folder: Path, needed: str) -> None:
        self.folder, self.needed, self._time = folder, needed, 1e9

    def run(self, *tests: str, seconds: float = 0) -> tuple[int | None, str]:
        is_red = self.needed not in (self.folder / "file").read_text()
        return int(is_red), f"FAILED tests/{tests[0]}[x] - because" if is_red else ""


@pytest.mark.parametrize(("needed", "text"), [("control", "killed"), ("other", "survived")])
def test_a_test_that_does_not_notice_survives(needed: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("other control")
    copy = Folder(tmp_path, needed)
    assert verdict(copy, Removal("S-01", "file", "control", "", "a.py::test_b")) == text
    assert (tmp_path / "file").read_text() == "other control"


def test_a_test_that_always_fails_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("other control")
    assert Folder(tmp_path, "control").red(["a.py::test_b"]) == set()
    assert Folder(tmp_path, "missing").red(["a.py::test_b", "a.py::test_c"]) == {"a.py::test_b"}


def test_rows_are_read_with_their_tests() -> None:
    line = "| S-77 | x | passed | [a](../tests/a.py) `test_b`, `test_c`; [d](../tests/d.py) and more |"
    assert rows(line) == [Row("S-77", "passed", frozenset({"a.py::test_b", "a.py::test_c", "d.py"}))]
    assert rows("| R-77 gauges | in part | nothing |") == [Row("R-77", "in part", frozenset())]
