"""`ResponseTemplate` reads a whole answer by a tokenizer's own `response_template`.

transformers defines the form (`utils/chat_parsing`, version 1): an answer is cut into regions, each of a field of the
message, by the marks that open and close them; at most one field has no opening mark and gets the rest of the text. A
later region of a field replaces an earlier one, unless the field `repeats`. No part is certain before the answer's end.
Patterns come from strangers, so their work is bounded. Knows no tokens; `whole_parser` makes an answer's parts from the
regions, `serve.call.dialect` finds the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headrace.text.tools import response_values

_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = set(
    "open open_pattern close close_pattern content content_args repeats join optional transform transform_each".split()
)
MAX_FIELDS = 64


class _Mark:
    """A mark that opens or closes regions: one of several texts, or a pattern."""

    def __init__(self, texts: tuple[str, ...], pattern: str) -> None:
        self.is_pattern = not texts
        self.source = pattern or "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        self.pattern = response_values.compiled(pattern) if pattern else re.compile(self.source)


class Field(NamedTuple):
    """The form of a field of the message."""

    name: str
    opening: _Mark | None
    closing: _Mark | None
    content: str
    options: Mapping[str, Any]
    repeats: bool
    join: str | None
    transform: Any
    each: bool

    def value(self, text: str, captures: Mapping[str, str]) -> Any:
        """Return the value of a region. Raises `ValueError`."""
        value = response_values.read(text, self.content, self.options)
        if self.transform is None:
            return value
        if not self.each:
            return response_values.placed(self.transform, {**captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("there is no list of objects to transform")
        return [response_values.placed(self.transform, {**captures, **item}) for item in value]


class Region(NamedTuple):
    """The part of an answer from `start` to `end`, with its marks; `body` is between them. `is_closed`: whether its
    end is marked, or needs no mark."""

    field: Field
    captures: Mapping[str, str]
    start: int
    body: tuple[int, int]
    end: int
    is_closed: bool


class ResponseTemplate:
    """A template of version 1. Raises `ValueError`, with the reason, for a template that does not have the form or has
    patterns that Python cannot compile."""

    def __init__(self, spec: Any) -> None:
        if not isinstance(spec, dict) or spec.get("version", 1) != 1 or not spec.keys() <= _KEYS:
            raise ValueError(f"it is not an object of version 1 with {', '.join(sorted(_KEYS))}")
        fields = spec.get("fields")
        if not isinstance(fields, dict) or not 0 < len(fields) <= MAX_FIELDS:
            raise ValueError(f"fields is not an object of 1 to {MAX_FIELDS} fields")
        self.fields = {name: _field(name, entry) for name, entry in fields.items()}
        bare = [field for field in self.fields.values() if field.opening is None]
        if len(bare) > 1:
            raise ValueError("more than one field has neither open nor open_pattern")
        self._rest = bare[0] if bare else None
        anchor = _mark("response_template", spec, "start_anchor")
        if anchor is None:
            raise ValueError("it has neither start_anchor nor start_anchor_pattern")
        self._anchor = anchor
        self.texts = "\n".join(_texts(fields)).replace("\\", "")
        """All texts in the fields, as they would stand in an answer; marks are among them."""

    def begun(self, prompt: str) -> str:
        """Return the part of the answer that the prompt contains: all after the last anchor; "" without one. Raises
        `ValueError`."""
        if self._anchor.is_pattern:
            response_values.check_cost([self._anchor.source], prompt)
        end = len(prompt)
        for match in self._anchor.pattern.finditer(prompt):
            end = match.end()
        return prompt[end:]

    def regions(self, text: str) -> list[Region]:
        """Return the regions of an answer in their order; text outside all fields is left out. Raises `ValueError` for
        an answer that takes too long."""
        marks = [mark for field in self.fields.values() for mark in (field.opening, field.closing) if mark is not None]
        response_values.check_cost((mark.source for mark in marks if mark.is_pattern), text)
        return list(_Regions(self.fields.values(), self._rest, text))


class _Regions:
    """The regions of one text. The next place of a mark is searched for once, however many regions there are."""

    def __init__(self, fields: Any, rest: Field | None, text: str) -> None:
        self._openings = [(field, field.opening.pattern) for field in fields if field.opening is not None]
        self._rest = rest
        self._text = text
        self._matches: dict[tuple[str, bool], re.Match[str] | None] = {}

    def __iter__(self) -> Iterator[Region]:
        at, size = 0, len(self._text)
        while True:
            match, field = self._next(at)
            end = size if match is None else match.start()
            if self._rest is not None and end > at:
                closed = field is None and match is not None
                is_whole = closed or self._rest.closing is None or field is not None
                yield Region(self._rest, {}, at, (at, end), match.end() if closed and match else end, is_whole)
            if match is None:
                return
            if field is None:
                if match.end() == match.start() == at:
                    # A mark without letters, found again at its own place.
                    return
                at = match.end()
                continue
            closing = None if field.closing is None else field.closing.pattern.search(self._text, match.end())
            body_end, after = (size, size) if closing is None else closing.span()
            captures = {name: text for name, text in match.groupdict().items() if text is not None}
            is_whole = closing is not None or field.closing is None
            yield Region(field, captures, match.start(), (match.end(), body_end), after, is_whole)
            if closing is None or after == match.start():
                # The answer ends; without this, marks without letters would be found for ever.
                return
            at = after

    def _next(self, at: int) -> tuple[re.Match[str] | None, Field | None]:
        """Return the first mark from `at` on (of several at one place the longest) and the field that it opens, None if
        it closes the rest."""
        matches: list[tuple[int, int, int, str, re.Match[str], Field | None]] = []
        for field, pattern in self._openings:
            if (match := self._search(field.name, True, pattern, at)) is not None:
                matches.append((match.start(), match.start() - match.end(), 0, field.name, match, field))
        rest = self._rest
        if rest is not None and rest.closing is not None:
            match = self._search(rest.name, False, rest.closing.pattern, at)
            if match is not None:
                matches.append((match.start(), match.start() - match.end(), 1, rest.name, match, None))
        if not matches:
            return None, None
        *_, match, opened = min(matches, key=lambda entry: entry[:4])
        return match, opened

    def _search(self, name: str, opens: bool, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        key = name, opens
        if key not in self._matches or ((last := self._matches[key]) is not None and last.start() < at):
            self._matches[key] = pattern.search(self._text, at)
        return self._matches[key]


def _field(name: str, entry: Any) -> Field:
    if not isinstance(entry, dict) or not entry.keys() <= _FIELD_KEYS:
        raise ValueError(f"the field {name!r:.80} is not an object with {', '.join(sorted(_FIELD_KEYS))}")
    content, options = entry.get("content", "text"), entry.get("content_args", {})
    response_values.check(content, options)
    opening, closing = _mark(name, entry, "open"), _mark(name, entry, "close")
    join, each, transform = entry.get("join"), entry.get("transform_each", False), entry.get("transform")
    if join is not None and not (isinstance(join, str) and entry.get("repeats")):
        raise ValueError(f"the field {name!r:.80}: join is no text, or the field does not repeat")
    names = {group for mark in (opening, closing) if mark is not None for group in mark.pattern.groupindex}
    if transform is None and (each or names):
        raise ValueError(f"the field {name!r:.80} has no transform for its parts")
    response_values.check_transform(transform)
    return Field(name, opening, closing, content, options, bool(entry.get("repeats")), join, transform, bool(each))


def _mark(name: str, entry: Mapping[str, Any], key: str) -> _Mark | None:
    pattern, texts = entry.get(f"{key}_pattern"), entry.get(key)
    if key in entry and f"{key}_pattern" in entry:
        raise ValueError(f"{name!r:.80} has both {key} and {key}_pattern")
    if f"{key}_pattern" in entry:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{name!r:.80}: {key}_pattern is not a pattern")
        return _Mark((), pattern)
    if key not in entry:
        return None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name!r:.80}: {key} is no text and no list of texts")
    return _Mark(tuple(texts), "")


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in plain data, which is not nested more deeply than the checks of `_field` allow."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)
