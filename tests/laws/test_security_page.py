"""docs/security.md has a row for each of S-01 to S-43, and every test that it names exists."""

from __future__ import annotations

import re

from tests.laws import rules

PAGE = rules.ROOT / "docs" / "security.md"
STATES = ("passed", "in part", "not applicable", "open")


def faults(text: str) -> list[str]:
    """What is wrong with the table of a page."""
    rows = re.findall(r"^\| (S-\d\d) \|(.*)\|$", text, re.M)
    result = [f"rows: {name}" for name, _ in rows if [n for n, _ in rows].count(name) > 1]
    result += [f"no row: S-{number:02d}" for number in range(1, 44) if f"S-{number:02d}" not in dict(rows)]
    for name, row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 3 or cells[1] not in STATES:
            result.append(f"{name}: not of the states {STATES}")
            continue
        named = 0
        for path, rest in re.findall(r"\]\(\.\./([\w/]+\.py)\)([^\[]*)", cells[2]):
            source = rules.ROOT / path
            there = source.read_text() if source.is_file() else ""
            result += [f"{name}: {path} is not there"] if not there else []
            for test in re.findall(r"`(test_\w+)`", rest):
                named += 1
                result += [f"{name}: {path} has no {test}"] if f"def {test}(" not in there else []
            named += not re.search(r"`test_", rest) and bool(there)
        if cells[1] == "passed" and not named:
            result.append(f"{name}: passed, and no test is named")
        if cells[1] in ("not applicable", "open") and len(cells[2]) < 10:
            result.append(f"{name}: no reason")
        if cells[1] == "in part" and not re.search(r"open:|no |with models", cells[2]):
            result.append(f"{name}: what is missing is not said")
    return result


def test_every_class_has_a_row_and_its_tests_exist() -> None:
    assert faults(PAGE.read_text(encoding="utf-8")) == []


def test_a_row_that_names_nothing_is_noticed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = re.search(r"^\| S-20 .*$", text, re.M)
    assert first
    assert faults(text.replace(first[0], "")) == ["no row: S-20"]
    assert faults(text.replace("test_S_20_hostile_json_on_every_route", "test_S_20_nothing"))
    assert faults(text.replace(first[0], "| S-20 | x | passed | trust us |")) == ["S-20: passed, and no test is named"]
    assert faults(text.replace(first[0], "| S-20 | x | fine | x |"))
    assert faults(text + first[0] + "\n")
