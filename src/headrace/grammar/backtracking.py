"""Bounds the work of Python's `re` with a stranger's pattern: it tries one way to match after another, and of some
patterns the number of ways doubles with each letter of the text.

Knows patterns alone. Called by `evaluate`.
"""

from __future__ import annotations

import functools
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN = 1024
"""Characters of a pattern whose ways are counted; a longer one has too many."""
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ASSERTIONS = (_constants.ASSERT, _constants.ASSERT_NOT)
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
    """Return the ways of `low` to `high` repetitions of what has so many `ways`."""
    num_counts = max(1, high - low + 1)
    if ways == 1:
        return num_counts
    all_ways = 1
    for _ in range(high):
        all_ways *= ways
        if all_ways > most:
            return most + 1
    return all_ways * num_counts
