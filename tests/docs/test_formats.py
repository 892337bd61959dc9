"""The lists of formats and styles in howto-tools.md are those of the registries."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import pytest
from tests.laws.rules import ROOT
from tests.support.speaking import layout_of

from headrace.protocol.errors import RequestError
from headrace.text import reasoning
from headrace.text.tools import formats

TEXT = (ROOT / "docs" / "howto-tools.md").read_text(encoding="utf-8")


def names(text: str) -> list[str]:
    return re.findall(r"`([a-z0-9_]+)`", text)


def table(text: str, heading: str) -> list[str]:
    """The names in the first column of the table with this heading."""
    rows = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in names(row.split("|")[1])]


def listed(text: str, pattern: str) -> set[str]:
    """The names in the brackets of the one place where a pattern matches."""
    [names_there] = re.findall(pattern, " ".join(text.split()))
    return set(names(names_there))


def with_body(*bodies: str) -> set[str]:
    return {name for name, each in formats.FORMATS.items() if layout_of(each, "").body in bodies}


def faults(text: str) -> list[str]:
    """What of the lists in a page is not what the registries have."""

    def differs(what: str, on_page: Collection[str], there: Collection[str]) -> list[str]:
        return [f"{what}: {sorted(set(on_page) ^ set(there))}"] if sorted(on_page) != sorted(there) else []

    def resolved(on_page: list[str], resolve: Callable[[str], str]) -> list[str]:
        """The names that are keys, and of the others those that are no name of a key."""
        keys = []
        for name in on_page:
            try:
                keys += [name] if resolve(name) == name else []
            except RequestError:
                keys.append(name)
        return keys

    unmarked = {name for name, each in formats.FORMATS.items() if each.layouts[0].marks == "read only"}
    return [
        *differs("formats", resolved(table(text, "| name | looks like |"), formats.format_name), formats.FORMATS),
        *differs("styles", resolved(table(text, "| name | marks |"), reasoning.style_name), reasoning.STYLES),
        *differs("no quotes", listed(text, r"write strings without quotes \(([^)]*)\)"), with_body("tagged", "xml")),
        *differs("bare text", listed(text, r"writes bare text \(([^)]*)\)"), with_body("tagged", "xml")),
        *differs("no mark", listed(text, r"no mark before a call \(([^)]*)\)"), unmarked),
        *differs(
            "no JSON", listed(text, r"\(([^()]*) do not write JSON"), with_body("python", "tagged", "xml", "bare")
        ),
    ]


def test_the_page_lists_what_is_there() -> None:
    assert faults(TEXT) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("| `gemma4` | `<\\|tool_call>", "| `gemma5` | `<\\|tool_call>"), ("`llama3_json`,\n  `pythonic`", "`pythonic`")],
)
def test_control_a_wrong_list_is_noticed(old: str, new: str) -> None:
    assert old in TEXT
    assert len(faults(TEXT.replace(old, new))) == 1
