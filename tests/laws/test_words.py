"""Variables are nouns that say what they hold, and prose does not make persons of things."""

from __future__ import annotations

import pytest
from tests.laws import rules


def test_words_say_what_they_mean() -> None:
    broken = [line for module, source in rules.sources() for line in rules.word_violations(module, source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("folder", ["bench", "training", "tests"])
def test_words_outside_the_package_do_too(folder: str) -> None:
    paths = sorted((rules.ROOT / folder).rglob("*.py"))
    assert paths
    broken = [
        line for path in paths for line in rules.word_violations(str(path.relative_to(rules.ROOT)), path.read_text())
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "_held: int = 1",
        "def f(given): ...",
        "def f(*, asked): ...",
        "f = lambda kept: kept",
        "def f():\n    for told in []: ...",
        "def f():\n    a, (b, shown) = 1, (2, 3)",
        "x = [y for taken in z for y in taken]",
        "with open(p) as made: ...",
        "if (own := f()): ...",
        "class A:\n    def __init__(self):\n        self._drawn = 1",
        'def f():\n    """The client is told."""',
        'def f():\n    """The clients are\n    told."""',
        'x = 1\n"""A drafter, who guesses."""',
        "x = 1  # Whoever calls it.",
        "# It asks for\n# nothing.\nx = 1",
    ],
)
def test_a_riddle_is_caught(source: str) -> None:
    assert rules.word_violations("a", source)


@pytest.mark.parametrize(
    "source",
    [
        "num_found = 1",
        "found_at = 1",
        "class A:\n    sent: float = 0.0\n    done = 1",
        "x = record.found",
        "other.sent = 1",
        "f(made=1)",
        "x = 'is told'  # a message",
        "# The client is\nx = 1\n# told apart",
    ],
)
def test_what_is_no_riddle_is_let_through(source: str) -> None:
    assert rules.word_violations("a", source) == []
