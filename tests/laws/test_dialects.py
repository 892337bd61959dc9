"""Every type of model has a dialect, or a reason for none; what docs/compatibility.md says of it is true and whole."""

from __future__ import annotations

from collections.abc import Mapping

from tests.programs import dialects
from tests.programs.dialects import FAMILIES, Family

from headrace import models
from headrace.text.reasoning import STYLES
from headrace.text.tools.formats import FORMATS


def faults(families: Mapping[str, Family]) -> list[str]:
    """What is missing in a table of families."""
    missing = [f"{name}: no row" for name in models.names() if name not in families]
    for name, family in families.items():
        if name not in models.names():
            missing.append(f"{name}: no type")
        if bool(family.dialects) == bool(family.why):
            missing.append(f"{name}: neither a dialect nor a reason, or both")
        for tools, style, _ in family.dialects:
            missing += [f"{name}: {tools}"] if tools is not None and tools not in FORMATS else []
            missing += [f"{name}: {style}"] if style is not None and style not in STYLES else []
        missing += [
            f"{name}: {models}" for models in family.sources if models not in {row[2] for row in family.dialects}
        ]
    return missing


def test_every_type_has_a_dialect_or_a_reason() -> None:
    assert faults(FAMILIES) == []


def test_control_a_type_without_a_row_or_a_reason_is_noticed() -> None:
    without = {name: family for name, family in FAMILIES.items() if name != "gpt_oss"}
    assert faults(without) == ["gpt_oss: no row"]
    assert faults(FAMILIES | {"gpt2": Family()}) == ["gpt2: neither a dialect nor a reason, or both"]
    assert faults(FAMILIES | {"gpt2": Family((("hermess", None, ""),))}) == ["gpt2: hermess"]
    assert faults(FAMILIES | {"gpt2": Family((("hermes", None, "GPT"),), sources={"GP": ""})}) == ["gpt2: GP"]


def test_no_cell_is_empty_and_every_dialect_works() -> None:
    rows = [line for line in dialects.section().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert all(len(row) == len(dialects.COLUMNS) and all(row) for row in cells)
    assert not [row for row in cells if "no" in row]


def test_control_a_dialect_that_is_read_wrongly_is_noticed() -> None:
    answer = dialects.Answer("", "Hi", dialects.CALLS)
    assert dialects.reads("hermes", None, answer)
    # White space before a mark is the mark's.
    assert not dialects.reads("hermes", None, answer._replace(content="Hi "))
