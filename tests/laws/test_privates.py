"""Tests look at what a caller sees: few lines reach into a private part of another object, and never more.

`python -m tests.laws.privates` lists them."""

from __future__ import annotations

import pytest
from tests.laws import privates

MAX_PRIVATE_LINES = 103
"""It only falls. What is left plants bugs in a function or reads a count that no caller needs."""


def test_few_lines_of_tests_reach_into_private_parts() -> None:
    lines = privates.listed()
    assert len(lines) <= MAX_PRIVATE_LINES, "\n".join(lines)
    assert lines, "the count sees none at all"


@pytest.mark.parametrize(
    "line",
    [
        "x._part",
        "x.y()._part = 3",
        "del x[0]._part",
        "with_many(\n    lines,\n)._part",
        "patch.setattr(thing, '_part', 3)",
        "monkeypatch.setattr('headrace.core._part', None)",
        "getattr(x, '_part', None)",
        "from headrace.core import _part",
        "def f(self):\n    self._part",
        "class A:\n    def f(self):\n        self.other._part",
    ],
)
def test_a_private_part_of_another_is_seen(line: str) -> None:
    assert len(privates.private_lines(line)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x.part",
        "x.__dict__",
        "record._replace(a=1)._asdict()",
        "class A(B):\n    def f(self):\n        self._part = super()._part",
        "class A:\n    @classmethod\n    def f(cls):\n        return lambda: cls._part",
        "import os\nos._exit(1)",
        "from triton.runtime import interpreter as i\ni._patch(1)\nmonkeypatch.setattr(i, '_patch', 1)",
        "from triton import _C",
        "from headrace import _native",
        "getattr(x, 'part')",
    ],
)
def test_a_part_of_ones_own_or_of_a_library_is_none_of_them(source: str) -> None:
    assert privates.private_lines(source) == []
