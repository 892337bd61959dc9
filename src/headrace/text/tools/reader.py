"""`Reader` reads a text that comes in pieces as if it were whole: its generators pause where the text ends for now.

Each generator either reads on or raises `IllFormed`; the place where it stops depends on the text alone, never on the
cuts. Holds the text that is not yet read. Called by `parser`, by the code that reads a format and by `reasoning`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A computation that pauses (yields) when it needs more text."""

MAX_DEPTH = 64
"""Levels of arrays and objects in the arguments of a call."""
MAX_NAME = 256
MAX_FRAME_SPACE = 64
"""The most characters of white space before a mark that belong to it."""

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = re.compile(r"[0-9]+")
_HEX = frozenset("0123456789abcdefABCDEF")


class IllFormed(Exception):
    """The text does not follow the format, or it ends too soon."""


class Reader:
    """`text[at:]` is the text to read. Positions in the whole text are `base` + place in `text`.

    Text that was read and may be needed again is kept in pieces, so that no character is copied more than a few times.
    """

    def __init__(self) -> None:
        self._history: list[str] = []
        self.text = ""
        self.at = 0
        self.base = 0
        self.final = False
        self._pin: int | None = None
        # The place of an earlier search for a text that the end cut.
        self._short = -1

    @property
    def position(self) -> int:
        """The number of characters of the whole text that have been read."""
        return self.base + self.at

    @property
    def is_cut(self) -> bool:
        """Whether reading has stopped because the text ends here."""
        return self.final and (self.at == len(self.text) or self._short == self.position)

    def push(self, text: str, final: bool, keep: int) -> None:
        """Add text; the text before the position `keep` is no longer needed."""
        if self.position > (keep if self._pin is None else min(keep, self._pin)):
            self._history.append(self.text[: self.at])
        else:
            self._history.clear()
        self.base, self.text, self.at = self.position, self.text[self.at :] + text, 0
        self.final = final

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Drop no text from here on inside the block, so that `since` can return it."""
        outer = self._pin
        self._pin = self.position if outer is None else outer
        try:
            yield
        finally:
            self._pin = outer

    def since(self, position: int) -> str:
        """Return the text from `position` to where reading is."""
        if position >= self.base:
            return self.text[position - self.base : self.at]
        pieces, start = [self.text[: self.at]], self.base
        for piece in reversed(self._history):
            pieces.append(piece)
            start -= len(piece)
            if start <= position:
                break
        return "".join(reversed(pieces))[position - start :]

    def rewind(self, position: int) -> None:
        """Unread the text since `position`, which was kept."""
        back = self.since(position)
        self.text, self.at, self.base = back + self.text[self.at :], 0, position
        # The text before this place is not needed again.
        self._history.clear()

    def open_end(self, literals: Iterable[str]) -> int:
        """Return the place in `text` where one of `literals`, none of which is in it, may begin."""
        longest = 0
        for literal in () if self.final else literals:
            sizes = range(min(len(literal) - 1, len(self.text) - self.at), longest, -1)
            longest = next((size for size in sizes if self.text.endswith(literal[:size])), longest)
        return len(self.text) - longest

    def before_space(self, end: int) -> int:
        """Return the place in `text` of the white space that belongs to a mark at `end`."""
        low = max(self.at, end - MAX_FRAME_SPACE)
        while end > low and self.text[end - 1] in SPACE:
            end -= 1
        return end

    def peek(self, num: int = 1) -> Reading[str]:
        """Return the next `num` characters, fewer only at the end of the text, without reading them."""
        while len(self.text) - self.at < num and not self.final:
            yield
        return self.text[self.at : self.at + num]

    def comes(self, literal: str) -> Reading[bool]:
        """Return whether `literal` comes next. Pauses only while that is undecided."""
        while True:
            start = self.text[self.at : self.at + len(literal)]
            if len(start) == len(literal) or not literal.startswith(start):
                return start == literal
            if self.final:
                self._short = self.position
                return False
            yield

    def comes_spaced(self, literal: str) -> Reading[bool]:
        """Return whether the letters of `literal`, which has no white space, come next, with any white space between
        them. Pauses only while that is undecided."""
        place = 0
        for letter in literal:
            while True:
                match = _SPACES.match(self.text, self.at + place)
                place = (match.end() if match else self.at + place) - self.at
                if self.at + place < len(self.text) or self.final:
                    break
                yield
            if self.text[self.at + place : self.at + place + 1] != letter:
                return False
            place += 1
        return True

    def take(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next; return whether it did."""
        if (yield from self.comes(literal)):
            self.at += len(literal)
            return True
        return False

    def closes(self, literal: str, least: int = 0) -> Reading[bool]:
        """Read `literal` if it comes next, or its beginning of at least so many letters if the text ends with that;
        return whether it did."""
        if (yield from self.take(literal)):
            return True
        rest = self.text[self.at :]
        if not self.final or len(rest) < least or not literal.startswith(rest):
            return False
        self.at = len(self.text)
        return True

    def expect(self, *literals: str) -> Reading[str]:
        """Read the first of `literals` that comes next, and return it. Raises `IllFormed`."""
        for literal in literals:
            if (yield from self.take(literal)):
                return literal
        raise IllFormed

    def space(self) -> Reading[None]:
        """Read white space, if there is any."""
        while True:
            match = _SPACES.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.final:
                return
            yield

    def until(self, literal: str) -> Reading[str]:
        """Read past the next `literal` and return the text before it. Raises `IllFormed` if it never comes, having read
        all."""
        start = self.position
        with self.kept():
            while True:
                place = self.text.find(literal, self.at)
                if place >= 0:
                    self.at = place
                    before = self.since(start)
                    self.at += len(literal)
                    return before
                if self.final:
                    self.at = len(self.text)
                    raise IllFormed
                # Read all but an end that may be the beginning of `literal`.
                self.at = max(self.at, len(self.text) - len(literal) + 1)
                yield

    def while_matches(self, pattern: re.Pattern[str]) -> Reading[int]:
        """Read characters as long as they match `pattern`, of the form `[...]+`; return their number."""
        start = self.position
        while True:
            match = pattern.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.final:
                return self.position - start
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read as `while_matches` does and return the text. Raises `IllFormed` if it is empty."""
        start = self.position
        with self.kept():
            if not (yield from self.while_matches(pattern)):
                raise IllFormed
            return self.since(start)

    def json_value(self, depth: int = 0) -> Reading[None]:
        """Read one JSON value (RFC 8259, strictly). Raises `IllFormed` at the first character that is out of place."""
        first = yield from self.peek()
        if first == "{":
            yield from self.json_object(depth)
        elif first == "[":
            yield from self._json_members("[]", depth)
        elif first == '"':
            yield from self.json_string()
        elif first and first in "-0123456789":
            yield from self._json_number()
        else:
            yield from self.expect("true", "false", "null")

    def json_object(self, depth: int = 0) -> Reading[None]:
        """Read one JSON object."""
        yield from self._json_members("{}", depth)

    def key(self) -> Reading[str]:
        """Read one JSON string and return its value."""
        start = self.position
        with self.kept():
            yield from self.json_string()
            value: str = json.loads(self.since(start))
        return value

    def json_string(self) -> Reading[None]:
        """Read one JSON string."""
        yield from self.expect('"')
        while True:
            yield from self.while_matches(_PLAIN)
            if (yield from self.take('"')):
                return
            yield from self.expect("\\")
            letter = yield from self.peek()
            if not letter or letter not in '"\\/bfnrtu':
                raise IllFormed
            self.at += 1
            for _ in range(4 if letter == "u" else 0):
                if (yield from self.peek()) not in _HEX:
                    raise IllFormed
                self.at += 1

    def colon(self) -> Reading[None]:
        """Read the colon between key and value, and the space around it."""
        yield from self.space()
        yield from self.expect(":")
        yield from self.space()

    def comma(self, closing: str) -> Reading[bool]:
        """Read a comma (True) or `closing` (False), and the space around it."""
        yield from self.space()
        if (yield from self.expect(",", closing)) == closing:
            return False
        yield from self.space()
        return True

    def _json_members(self, brackets: str, depth: int) -> Reading[None]:
        """Read an array or an object, as the brackets say."""
        opening, closing = brackets[0], brackets[1]
        if depth >= MAX_DEPTH:
            raise IllFormed
        yield from self.expect(opening)
        yield from self.space()
        if (yield from self.take(closing)):
            return
        while True:
            if brackets == "{}":
                yield from self.json_string()
                yield from self.colon()
            yield from self.json_value(depth + 1)
            if not (yield from self.comma(closing)):
                return

    def _json_number(self) -> Reading[None]:
        yield from self.take("-")
        if not (yield from self.take("0")):
            yield from self._digits()
        if (yield from self.take(".")):
            yield from self._digits()
        if (yield from self.take("e")) or (yield from self.take("E")):
            if not (yield from self.take("+")):
                yield from self.take("-")
            yield from self._digits()

    def _digits(self) -> Reading[None]:
        if not (yield from self.while_matches(_DIGITS)):
            raise IllFormed
