"""Matches the regular expressions of a checkpoint's settings against names of layers, in polynomial time.

Python's `re` tries one way to match after another, and of some patterns the number of ways doubles with each letter.
`matches` therefore gives it plain patterns only. Of all others it finds the set of places at which each part of the
pattern can end (Thompson 1968), which takes at most a power of the name's length. Knows patterns alone; called by
`layer_names`.
"""

from __future__ import annotations

import functools
import re
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from headrace.protocol.errors import CheckpointError

MAX_PATTERN = 2**16
"""Characters of a pattern: a list of all layers of a large model."""
MAX_REPEATS = 4
"""Open repetitions in a pattern that `re` matches."""
MAX_PARTS = 10**6
"""Parts of a pattern that are tried at places of one name."""

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_SINGLE = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY)
_WORD = re.compile(r"\w")


def matches(pattern: str, name: str, *, anywhere: bool = False) -> bool:
    """Return whether a regular expression matches the start of `name`, or `anywhere` in it.

    Raises `CheckpointError` for a pattern that is none, is too long, or has back references or atomic groups."""
    try:
        if _is_plain(pattern):
            return (re.search if anywhere else re.match)(pattern, name) is not None
        return matches_by_places(pattern, name, anywhere=anywhere)
    except (re.error, RecursionError) as error:
        raise CheckpointError(f"quantization_config: {pattern!r:.80} is no regular expression: {error}") from error
    except _TooComplicatedError as error:
        raise CheckpointError(
            f"quantization_config: the pattern {pattern!r:.80} is too complicated to be matched safely: {error}"
        ) from error


def matches_by_places(pattern: str, name: str, *, anywhere: bool = False) -> bool:
    """As `matches`, without `re`. Raises `re.error`, and `RecursionError` for a pattern that is nested too deeply."""
    parsed = _parse(pattern)
    ends, places = _Ends(name), range(len(name) + 1 if anywhere else 1)
    return any(ends.of_all(parsed, {place}, parsed.state.flags) for place in places)


@functools.lru_cache(maxsize=1024)
def _is_plain(pattern: str) -> bool:
    """Whether `re` matches it fast. A repeated group can take exponential time, and each open repetition adds a power
    of the name's length."""
    if len(pattern) > MAX_PATTERN:
        raise _TooComplicatedError(f"it has {len(pattern)} characters, at most {MAX_PATTERN} are matched")
    return len(re.findall(r"[*+{]", pattern)) <= MAX_REPEATS and not re.search(r"\)[*+{]", pattern)


@functools.lru_cache(maxsize=64)
def _parse(pattern: str) -> Any:
    return _parser.parse(pattern)


class _TooComplicatedError(Exception):
    pass


class _Ends:
    """The places of one name at which parts of a pattern end, by the place at which they begin."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def of_all(self, parts: Any, places: set[int], flags: int) -> set[int]:
        """Return the places at which a sequence of parts can end that begins at one of `places`."""
        for part in parts:
            places = self._of_each(part, places, flags)
            if not places:
                break
        return places

    def _of_each(self, part: Any, places: set[int], flags: int) -> set[int]:
        return {end for place in places for end in self._of(part, place, flags)}

    def _of(self, part: Any, place: int, flags: int) -> frozenset[int]:
        key = id(part), place
        if key not in self._known:
            if len(self._known) >= MAX_PARTS:
                raise _TooComplicatedError(f"more than {MAX_PARTS} parts would be tried")
            self._known[key] = frozenset(self._find(part[0], part[1], place, flags))
        return self._known[key]

    def _find(self, kind: Any, value: Any, place: int, flags: int) -> set[int]:
        if kind in _SINGLE:
            return {place + 1} if _letter(kind, value, flags).match(self._name[place : place + 1]) else set()
        if kind in _REPEATS:
            low, high, parts = value
            return self._repeated(low, high, parts, place, flags)
        if kind is _constants.SUBPATTERN:
            _, added, removed, parts = value
            return self.of_all(parts, {place}, (flags | added) & ~removed)
        if kind is _constants.BRANCH:
            return set().union(*(self.of_all(parts, {place}, flags) for parts in value[1]))
        if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
            direction, parts = value
            begins = [place] if direction > 0 else range(place + 1)
            ends = [self.of_all(parts, {begin}, flags) for begin in begins]
            is_matched = bool(ends[0]) if direction > 0 else any(place in each for each in ends)
            return {place} if is_matched == (kind is _constants.ASSERT) else set()
        if kind is _constants.AT:
            return {place} if self._is_at(value, place) else set()
        raise _TooComplicatedError(f"{str(kind).lower()} is not supported")

    def _repeated(self, low: int, high: int, parts: Any, place: int, flags: int) -> set[int]:
        """More repetitions than the name has letters add nothing: each but an empty one takes a letter."""
        places, most = {place}, len(self._name) + 1
        for _ in range(min(low, most)):
            places = self.of_all(parts, places, flags)
        ends, newest = set(places), set(places)
        for _ in range(min(high - low, most)):
            newest = self.of_all(parts, newest, flags) - ends
            if not newest:
                break
            ends |= newest
        return ends

    def _is_at(self, kind: Any, place: int) -> bool:
        if kind in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
            return place == 0
        if kind in (_constants.AT_END, _constants.AT_END_STRING):
            return place == len(self._name)
        before, after = self._name[max(place - 1, 0) : place], self._name[place : place + 1]
        is_boundary = bool(_WORD.match(before)) != bool(_WORD.match(after))
        return is_boundary == (kind is _constants.AT_BOUNDARY)


_LETTERS: dict[tuple[str, int], re.Pattern[str]] = {}
"""The compiled patterns of single letters, by their parts and flags."""


def _letter(kind: Any, value: Any, flags: int) -> re.Pattern[str]:
    """Return the pattern of one letter."""
    key = repr((kind, value)), flags
    if key not in _LETTERS:
        state = _parser.State()
        state.flags = flags
        _LETTERS[key] = _compiler.compile(_parser.SubPattern(state, [(kind, value)]), flags)
    return _LETTERS[key]
