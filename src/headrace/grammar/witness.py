"""Finds, for a regex, a text that matches it, and regexes of texts that do not match it.

For schemas that say which form a text or a property's name must not have. All results are right, but others may exist
that are not found. Python's parser of regexes reads the patterns; one that it cannot read has no examples. Called by
`rewrite`.
"""

from __future__ import annotations

import re
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

_LETTERS = "".join(map(chr, range(0x20, 0x7F)))


def example(pattern: str) -> str | None:
    """Return a short text in which `pattern` is found, or None."""
    try:
        text = _build(_parser.parse(pattern))
        return text if re.search(pattern, text) else None
    except (re.error, ValueError, OverflowError, RecursionError):
        return None


def others(pattern: str) -> list[str]:
    """Return regexes of texts in which `pattern` is not found. Some of these texts may match none of them."""
    try:
        parsed = _parser.parse(pattern)
        least, most = parsed.getwidth()
    except (re.error, OverflowError, RecursionError):
        return []
    patterns = []
    parts = list(parsed)
    begins = bool(parts) and parts[0] == (_constants.AT, _constants.AT_BEGINNING)
    ends = bool(parts) and parts[-1] == (_constants.AT, _constants.AT_END)
    if least > 0:
        patterns.append(f"^(.|\\n){{0,{min(least, 1000) - 1}}}$")
    if begins and ends and most < 1000 and len(parts) > 1:
        patterns.append(f"^(.|\\n){{{most + 1},}}$")
    inner = parts[1:] if begins else parts
    if begins and inner and (first := _letters(inner[0])) is not None:
        patterns.append(f"^[^{first}](.|\\n)*$")
    if not begins and inner:
        for part in inner:
            needed = _letters(part)
            if needed is not None:
                patterns.append(f"^[^{needed}]*$")
                break
    return patterns


def _letters(part: tuple[Any, Any]) -> str | None:
    """Return the inside of [...] for the letters that `part` begins with; None if it may be empty, or is unknown."""
    kind, value = part
    if kind is _constants.LITERAL:
        return _inside([part])
    if kind is _constants.IN:
        is_plain = all(inner in (_constants.LITERAL, _constants.RANGE) for inner, _ in value)
        return _inside(value) if is_plain else None
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and value[0] > 0:
        return _letters(value[2][0]) if len(value[2]) else None
    if kind is _constants.SUBPATTERN and len(value[3]):
        return _letters(value[3][0])
    return None


def _build(parsed: Any) -> str:
    text = ""
    for kind, value in parsed:
        if kind is _constants.LITERAL:
            text += chr(value)
        elif kind is _constants.NOT_LITERAL:
            text += next(letter for letter in "aA1" if ord(letter) != value)
        elif kind is _constants.ANY:
            text += "a"
        elif kind is _constants.IN:
            regex = re.compile(f"[{_inside(value)}]")
            letter = next(filter(regex.fullmatch, "a0_-. A" + _LETTERS), None)
            if letter is None:
                raise ValueError("no plain letter")
            text += letter
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            if value[0] > 100:
                raise ValueError("a long repetition")
            text += _build(value[2]) * value[0]
        elif kind is _constants.SUBPATTERN:
            text += _build(value[3])
        elif kind is _constants.BRANCH:
            text += min((_build(each) for each in value[1]), key=len)
        elif kind is not _constants.AT:
            raise ValueError(f"{kind} in a pattern")
    return text


def _inside(items: Any) -> str:
    """Return the inside of [...] for the parsed `items`."""
    names = {
        _constants.CATEGORY_DIGIT: r"\d",
        _constants.CATEGORY_NOT_DIGIT: r"\D",
        _constants.CATEGORY_SPACE: r"\s",
        _constants.CATEGORY_NOT_SPACE: r"\S",
        _constants.CATEGORY_WORD: r"\w",
        _constants.CATEGORY_NOT_WORD: r"\W",
    }
    letters = ""
    for kind, value in items:
        if kind is _constants.NEGATE:
            letters += "^"
        elif kind is _constants.LITERAL:
            letters += re.escape(chr(value))
        elif kind is _constants.RANGE:
            letters += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        elif kind is _constants.CATEGORY:
            letters += names[value]
        else:
            raise ValueError(f"{kind} in a class")
    return letters
