"""`ToolParser`: finds the calls in an answer's text with the help of one format, and tells everything else as content.

A call that is not well-formed is content, every character of it. For that a call is told only when it is whole; but a
long one (more than `HOLD` characters, or any if a grammar sees to its form) is told as it comes, so that a client does
not wait in silence. If such a call breaks off, its arguments end there, which is never whole JSON, and the rest is
content. White space next to a call belongs to the call. What comes out depends on the text alone, never on the pieces
that it came in. Knows no HTTP and no schema but the names and parameters of the tools.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.text.parts import Content, Part, ToolCall
from headrace.text.tools.reader import MAX_NAME, SPACE, IllFormed, Reader, Reading

HOLD = 256
MAX_HELD = 2**18
"""Characters of a call, at most, of which nothing can be told yet; a longer one is content."""
GRID = 4096

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters' JSON schemas, by the names of the tools."""


class Format(Protocol):
    """How a family of models writes calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """What opens a call (or a list of them), wherever it stands."""
        ...

    @property
    def starts(self) -> tuple[str, ...]:
        """What may open one at the start of the answer, or right after another."""
        ...

    def read(self, call: ToolParser) -> Reading[None]:
        """Read what was opened, telling `call` of each call in it. Raises `IllFormed`."""
        ...


def call_id() -> str:
    """A fresh id, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class _Call:
    """The call that is being read. Its places are positions in the whole text."""

    def __init__(self, mark: int) -> None:
        self.mark = mark
        """Where it begins."""
        self.space = ""
        """The white space before it."""
        self.told: str | None = None
        """Its id, once it was told."""
        self.name: str | None = None
        self.begun = False
        """Whether its arguments have begun."""
        self.verbatim = False
        """Whether they are being read as they stand; from `sent` on they were not yet taken over."""
        self.sent = mark
        self.written: list[str] = []
        """Arguments that were taken over and not told; they end at `end`."""
        self.end = mark


class ToolParser:
    """A `MessageParser` (see `parts`); the formats use its other methods, and its reader `text`.

    Args:
        new_id: makes the ids of calls.
        enforced: whether a grammar sees to it that all calls are well-formed.
        single: whether the answer is over after its first call.
    """

    def __init__(
        self,
        form: Format,
        schemas: Schemas,
        new_id: Callable[[], str] = call_id,
        enforced: bool = False,
        single: bool = False,
    ) -> None:
        self.ended = False
        self.text = Reader()
        self.schemas = schemas
        self._form = form
        self._opening = re.compile("|".join(map(re.escape, form.openers)) or r"(?!)")
        self._new_id = new_id
        self.enforced = enforced
        self._single = single
        self._hold = -1 if enforced else HOLD
        self._out: list[Part] = []
        self._num_calls = 0
        # Whether nothing but white space came since the start, or since a call.
        self._fresh = True
        self._reading = False
        self._call = _Call(0)
        self._run = self._read()

    def feed(self, text: str, final: bool) -> list[Part]:
        # Cut at fixed places, so that what is given up for its length does not depend on the pieces.
        while True:
            size = GRID - (self.text.base + len(self.text.text)) % GRID
            self._feed(text[:size], final and len(text) <= size)
            if len(text) < size:
                break
            text = text[size:]
            if (
                self._reading
                and self._call.told is None
                and self.text.base + len(self.text.text) - self._call.mark > MAX_HELD
            ):
                self._run.throw(IllFormed())
            if not text:
                break
        out, self._out = self._out, []
        return out

    def _feed(self, text: str, final: bool) -> None:
        keep = self.text.position
        if self._reading:
            call = self._call
            keep = call.mark if call.told is None else call.sent if call.verbatim else keep
        self.text.push(text, final, keep)
        next(self._run, None)
        self._stream()

    # For the formats.

    def name(self, name: str) -> None:
        """The name of the call that is being read."""
        if self._call.name is not None or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise IllFormed
        self._call.name = name

    def arguments(self) -> Reading[None]:
        """Read the call's arguments, a JSON object; they are told as they are written."""
        if self._call.begun:
            raise IllFormed
        self._call.begun = self._call.verbatim = True
        self._call.sent = self.text.position
        yield from self.text.json_object()
        self._catch_up()
        self._call.verbatim = False

    def write(self, arguments: str) -> None:
        """More of the arguments' JSON text, for formats that have them in some other form."""
        self._call.begun = True
        self._call.written.append(arguments)
        self._call.end = self.text.position

    def done(self) -> None:
        """The call is whole. One without arguments has an empty object of them."""
        if self._call.name is None:
            raise IllFormed
        if not self._call.begun:
            self.write("{}")
        self._announce()
        self._stream()
        self._num_calls += 1
        self._reset()
        if self._single:
            self.ended = True
            raise IllFormed

    def back(self) -> None:
        """Unread what was read since the last call."""
        self.text.rewind(self._call.mark)

    # The loop.

    def _read(self) -> Reading[None]:
        while not self.ended and (yield from self._content()):
            self._reading = True
            try:
                yield from self._form.read(self)
                self._fresh = True
            except IllFormed:
                if not self.ended:
                    self._give_up()
            self._reading = False

    def _content(self) -> Reading[bool]:
        """Tell content up to the next opening of a call; false if none comes to the end."""
        text = self.text
        while True:
            start, partial = self._start() if self._fresh else (-1, len(text.text))
            found = self._opening.search(text.text, text.at)
            opening = min(place for place in (start, found.start() if found else -1, 2**62) if place >= 0)
            end = opening if opening < 2**62 else min(partial, text.open_end(self._form.openers))
            space = text.before_space(end)
            if opening < 2**62:
                self._say(text.text[text.at : space])
                text.at = opening
                self._reset()
                self._call.space = text.text[space:opening]
                return True
            if text.final:
                # White space after the last call is no content.
                self._say(text.text[text.at : space if self._fresh and self._num_calls else end])
                text.at = len(text.text)
                return False
            self._say(text.text[text.at : space])
            text.at = space
            yield

    def _start(self) -> tuple[int, int]:
        """Where one of the format's `starts` is (-1: nowhere), and from where on that is open."""
        text = self.text
        at = text.at
        while at < len(text.text) and text.text[at] in SPACE:
            at += 1
        rest = text.text[at : at + 64]
        if any(rest.startswith(start) for start in self._form.starts):
            return at, at
        if not text.final and any(start.startswith(rest) for start in self._form.starts):
            return -1, at
        self._fresh = not rest
        return -1, len(text.text)

    def _give_up(self) -> None:
        self._catch_up()
        self._stream()
        if self._call.told is None:
            self._say(self._call.space + self.text.since(self._call.mark))
        else:
            self._num_calls += 1
        self._fresh = False
        self._reset()

    def _reset(self) -> None:
        self._call = _Call(self.text.position)

    def _catch_up(self) -> None:
        if self._call.verbatim:
            self.write(self.text.since(self._call.sent))
            self._call.sent = self.text.position

    def _stream(self) -> None:
        self._catch_up()
        call = self._call
        if call.name is not None and call.begun and call.end - call.mark > self._hold:
            self._announce()
        if call.told is not None and (piece := "".join(call.written)):
            self._out.append(ToolCall(self._num_calls, call.told, None, piece))
            call.written.clear()

    def _announce(self) -> None:
        if self._call.told is None:
            self._call.told = self._new_id()
            self._out.append(ToolCall(self._num_calls, self._call.told, self._call.name, ""))

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Content(text))
