"""docs/reliability.md has a row for each of R-01 to R-28 but the loading of adapters, which there is none of yet, and
every test that it names exists."""

from __future__ import annotations

import re

from tests.laws import rules

PAGE = rules.ROOT / "docs" / "reliability.md"
STATES = ("passed", "in part", "not applicable", "open")
# R-19 is about adapters that are loaded while requests run.
NUMBERS = [number for number in range(1, 29) if number != 19]


def faults(text: str) -> list[str]:
    """What is wrong with the table of a page."""
    rows = re.findall(r"^\| (R-\d\d) ([^|]*)\| ([^|]*) \|(.*)\|$", text, re.M)
    names = [name for name, *_ in rows]
    result = [f"twice: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    result += [f"no row: R-{number:02d}" for number in NUMBERS if f"R-{number:02d}" not in names]
    for name, _, state, evidence in rows:
        if state not in STATES:
            result.append(f"{name}: not of the states {STATES}")
        linked = re.findall(r"\]\(\.\./([\w/]+\.py)\)([^\[]*)", evidence)
        if state == "passed" and not linked:
            result.append(f"{name}: passed, and no test is named")
        for path, rest in linked:
            source = rules.ROOT / path
            there = source.read_text(encoding="utf-8") if source.is_file() else ""
            result += [] if there else [f"{name}: {path} is not there"]
            result += [
                f"{name}: {path} has no {t}" for t in re.findall(r"`(test_\w+)`", rest) if f"def {t}(" not in there
            ]
        if state in ("open", "not applicable") and len(evidence.strip()) < 10:
            result.append(f"{name}: no reason")
    return result


def test_every_fault_has_a_row_and_its_tests_exist() -> None:
    assert faults(PAGE.read_text(encoding="utf-8")) == []


def test_a_row_that_names_nothing_is_noticed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    row = re.search(r"^\| R-05 .*$", text, re.M)
    assert row
    assert faults(text.replace(row[0], "")) == ["no row: R-05"]
    assert faults(text.replace("test_R_05_aborts_that_hit_nothing_harm_nobody", "test_R_05_trust_us"))
    assert faults(text.replace(row[0], "| R-05 x | passed | trust us |")) == ["R-05: passed, and no test is named"]
    assert faults(text.replace(row[0], "| R-05 x | fine | x |"))
    assert faults(f"{text}{row[0]}\n") == ["twice: R-05"]
