"""Bounds the work of Python's `re` with a stranger's pattern: it tries one way to match after another, and of some
patterns the number of ways doubles with each letter of the text.

Knows patterns alone. Called by `evaluate` and by `text.tools.response_templates`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN = 1024
"""Characters of a pattern whose ways are counted; a longer one has too many."""
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ASSERTIONS = (_constants.ASSERT, _constants.ASSERT_NOT)
_SINGLE = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY)
_UNKNOWN = (_constants.ATOMIC_GROUP, _constants.GROUPREF_EXISTS)


@functools.lru_cache(maxsize=256)
def num_letters(pattern: str, length: int, most: int) -> int:
    """Return how many letters are compared, about and at most, when `pattern` is searched in a text of `length`; more
    than `most` are `most + 1`. Raises `re.error`, and `RecursionError` for a pattern that is nested too deeply."""
    if len(pattern) > MAX_PATTERN:
        return most + 1
    parsed = _parser.parse(pattern)
    least: int = parsed.getwidth()[0]
    return min(most + 1, _ways(parsed, length, most) * (length + 1) * (1 + min(least, length)))


def _ways(parsed: Any, length: int, most: int) -> int:
    ways = 1
    for kind, value in parsed:
        if kind in _REPEATS:
            ways *= _repeated(value[0], min(value[1], length), _ways(value[2], length, most), most)
        elif kind is _constants.SUBPATTERN:
            ways *= _ways(value[3], length, most)
        elif kind is _constants.BRANCH:
            ways *= sum(_ways(each, length, most) for each in value[1])
        elif kind in _ASSERTIONS:
            ways *= _ways(value[1], length, most)
        elif kind in _UNKNOWN:
            ways = most + 1
        ways = min(ways, most + 1)
    return ways


def _repeated(low: int, high: int, ways: int, most: int) -> int:
    """Return the ways of `low` to `high` repetitions of a part with so many `ways`."""
    num_counts = max(1, high - low + 1)
    if ways == 1:
        return num_counts
    all_ways = 1
    for _ in range(high):
        all_ways *= ways
        if all_ways > most:
            return most + 1
    return all_ways * num_counts


_END = ""
"""In place of a letter that comes next: the match is whole."""


def num_letters_in(pattern: str, text: str, most: int) -> int:
    """Return how many letters are compared, about and at most, when all matches of `pattern` are looked for in `text`,
    where a dot is any letter; more than `most` are `most + 1`. A bound that is closer than `num_letters`, and needs the
    text. Raises as that does."""
    if len(pattern) > MAX_PATTERN:
        return most + 1
    return _Search(*_parsed(pattern), text, most).num_letters()


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> tuple[Any, dict[str, re.Pattern[str]]]:
    """Return a pattern's parts, and a place for the patterns of its classes."""
    return _parser.parse(pattern, re.DOTALL), {}


class _Search:
    """Counts the work of a search in one text. Work and ways are pairs, of one try to match from one place."""

    def __init__(self, parsed: Any, classes: dict[str, re.Pattern[str]], text: str, most: int) -> None:
        self._parsed = parsed
        self._classes = classes
        self._text = text
        self._most = most
        self._runs: dict[str, tuple[int, int]] = {}

    def num_letters(self) -> int:
        if self._parsed.state.flags & re.IGNORECASE:
            return self._most + 1
        items, num_places = list(_flat(self._parsed)), len(self._text) + 1
        run = self._single_run(items[0]) if items else None
        if run is not None and self._stops_before(items[0][1][2][0], letter := self._first(items[1:], None)) and letter:
            # For example white space before a mark: the rest is compared only where the mark stands.
            num_tried = self._num_places(_literals(items[1:])) * (run + 1)
            total = num_places * (run + 1) + num_tried * self._sequence(items[1:], _END)[0]
        else:
            num_tried = self._num_places(_literals(items)) if items else num_places
            total = num_places + num_tried * self._sequence(items, _END)[0]
        return min(total, self._most + 1)

    def _num_places(self, literals: str) -> int:
        return len(re.findall(f"(?={re.escape(literals)})", self._text))

    def _sequence(self, items: Any, follow: str | None) -> tuple[int, int]:
        """`follow`: the letter that must come after it; None: it is not known."""
        items, work, ways, before, width = list(_flat(items)), 1, 1, 1, 1
        letter = None
        for place, (kind, value) in enumerate(items):
            more, times = self._item(kind, value, self._first(items[place + 1 :], follow))
            letter = None if kind is not _constants.LITERAL else value if letter is None else letter
            # The matches at all places together have at most as many letters as the text, for each occurrence of the
            # first letter in the literal.
            entries = ways * more if letter is None or letter == value else 0
            if width > 1 and self._single_run((kind, value)) is not None:
                # It is tried once at each place where the repetition before it may end.
                entries = min(entries, before * (width + self._run(value[2][0])[1]))
            work = min(work + entries, self._most + 1)
            before, width = ways, times if self._single_run((kind, value)) is not None else 1
            ways = min(ways * times, self._most + 1)
        return work, ways

    def _item(self, kind: Any, value: Any, follow: str | None) -> tuple[int, int]:
        match kind:
            case _constants.MAX_REPEAT | _constants.MIN_REPEAT | _constants.POSSESSIVE_REPEAT:
                work, ways = self._repeat(kind, value, follow)
                return work, 1 if kind is _constants.POSSESSIVE_REPEAT else ways
            case _constants.BRANCH:
                each = [self._sequence(branch, follow) for branch in value[1]]
                return sum(work for work, _ in each), sum(ways for _, ways in each)
            case _constants.ASSERT | _constants.ASSERT_NOT:
                return self._sequence(value[1], _END)[0], 1
            case _constants.ATOMIC_GROUP:
                return self._sequence(value, _END)[0], 1
            case _constants.AT:
                return 1, 1
        return (1, 1) if kind in _SINGLE else (self._most + 1, self._most + 1)

    def _repeat(self, kind: Any, value: Any, follow: str | None) -> tuple[int, int]:
        low, high, inner = value
        run = self._single_run((kind, value))
        if run is not None:
            return run + 1, 1 if self._stops_before(inner[0], follow) else max(1, run - low + 1)
        least = inner.getwidth()[0]
        if not least:
            return self._most + 1, self._most + 1
        work, ways = self._sequence(inner, None)
        most = min(high, len(self._text) // least + 1)
        all_ways = _repeated(min(low, most), most, ways, self._most)
        return max(most, all_ways) * work, all_ways

    def _single_run(self, item: Any) -> int | None:
        """Return the most letters that the repetition of a class of letters takes; None for anything else."""
        kind, value = item
        if kind not in _REPEATS or len(value[2]) != 1 or value[2][0][0] not in _SINGLE:
            return None
        high: int = value[1]
        return min(high, self._run(value[2][0])[0])

    def _stops_before(self, item: Any, follow: str | None) -> bool:
        """Whether the repetition of a class can end in one way only: the next letter is not of the class."""
        return follow is not None and (follow == _END or self._class(item).match(follow) is None)

    def _class(self, item: Any) -> re.Pattern[str]:
        """Return the pattern of the runs of a class."""
        key = repr(item)
        if key not in self._classes:
            state = self._parsed.state
            many = [(_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, _parser.SubPattern(state, [item])))]
            self._classes[key] = _compiler.compile(_parser.SubPattern(state, many))
        return self._classes[key]

    def _run(self, item: Any) -> tuple[int, int]:
        """Return the length of the longest run of a class, and the sum of the squares of all runs' lengths."""
        key = repr(item)
        if key not in self._runs:
            sizes = [match.end() - match.start() for match in self._class(item).finditer(self._text)]
            self._runs[key] = max(sizes, default=0), sum(size * size for size in sizes)
        return self._runs[key]

    def _first(self, items: list[Any], follow: str | None) -> str | None:
        """Return the letter with which a sequence must begin."""
        if not items:
            return follow
        kind, value = items[0]
        return chr(value) if kind is _constants.LITERAL else None


def _flat(items: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a sequence, with the parts of groups in place of the groups."""
    for kind, value in items:
        if kind is _constants.SUBPATTERN and not value[1] & re.IGNORECASE:
            yield from _flat(value[3])
        else:
            yield kind, value


def _literals(items: list[Any]) -> str:
    """Return the letters with which a sequence begins."""
    return "".join(chr(value) for _, value in itertools.takewhile(lambda item: item[0] is _constants.LITERAL, items))
