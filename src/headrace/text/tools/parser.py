"""`ToolParser` splits an answer's text, as it comes, into calls of tools and content.

A call that is not well-formed is content, every character of it. So a call is sent only when it is whole; but a long
one (more than `HOLD` characters, or any if a grammar guards its form) is sent as it comes, so that a client sees
progress. If such a call breaks off, its arguments end there, which is never whole JSON, and the rest is content. White
space next to a call belongs to the call. The result depends on the text alone, never on the pieces in which it came.
Knows no HTTP and no schema but the names and parameters of the tools. Made by `calls.new_parser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from headrace.text.outputs import Content, MessagePart, ToolCall
from headrace.text.tools.formats import ToolFormat
from headrace.text.tools.reader import MAX_NAME, SPACE, IllFormed, Reader, Reading

HOLD = 256
MAX_HELD = 2**18
"""Characters, at most, of a call of which nothing was sent yet; a longer one is content."""
GRID = 4096
"""Characters that are read at a time."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters' JSON schemas, by the names of the tools."""


class _Call:
    """The call that is being read. Positions count from the start of the whole text."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.space = ""
        """The white space before it."""
        self.id: str | None = None
        """Set when its first part is sent."""
        self.name: str | None = None
        self.has_arguments = False
        """Whether its arguments have begun."""
        self.verbatim = False
        """Whether its arguments are copied from the text; from `copied_to` on they are still to be copied."""
        self.copied_to = start
        self.unsent: list[str] = []
        """Arguments that were written and not sent."""
        self.end = start
        """The end of what was written of the arguments."""


class ToolParser:
    """A `MessageParser` (see `outputs`). What reads a format calls its other methods, and its reader `text`.

    Args:
        read: reads the calls at an opening of `tool_format`; raises `IllFormed`.
        new_id: makes the ids of calls.
        enforced: whether a grammar guarantees that all calls are well-formed.
        single: whether the answer is over after its first call.
    """

    def __init__(
        self,
        read: Callable[[ToolParser], Reading[None]],
        tool_format: ToolFormat,
        schemas: Schemas,
        new_id: Callable[[], str],
        enforced: bool = False,
        single: bool = False,
    ) -> None:
        self.ended = False
        self.text = Reader()
        self.schemas = schemas
        self._read_calls = read
        self._openers = tool_format.all_openers()
        self._starts = tool_format.starts
        self._opening = re.compile("|".join(map(re.escape, self._openers)))
        self._new_id = new_id
        self.enforced = enforced
        self._single = single
        self._first_mark = ""
        self._hold = -1 if enforced else HOLD
        self._out: list[MessagePart] = []
        self._num_calls = 0
        # Whether only white space came since the start, or since a call.
        self._fresh = True
        self._reading = False
        self._call = _Call(0)
        self._run = self._read()

    def feed(self, text: str, final: bool) -> list[MessagePart]:
        # Cut at fixed places, so that giving up a call for its length does not depend on the pieces.
        while True:
            size = GRID - (self.text.base + len(self.text.text)) % GRID
            self._feed(text[:size], final and len(text) <= size)
            if len(text) < size:
                break
            text = text[size:]
            num_held = self.text.base + len(self.text.text) - self._call.start
            if self._reading and self._call.id is None and num_held > MAX_HELD:
                self._run.throw(IllFormed())
            if not text:
                break
        out, self._out = self._out, []
        return out

    def _feed(self, text: str, final: bool) -> None:
        keep = self.text.position
        if self._reading:
            call = self._call
            keep = call.start if call.id is None else call.copied_to if call.verbatim else keep
        self.text.push(text, final, keep)
        next(self._run, None)
        self._stream()

    def begin(self, mark: str) -> None:
        """Take `mark`, the end of the prompt, for the beginning of the answer; it is never content."""
        self._first_mark = mark
        self._feed(mark, False)

    # For the code that reads a format.

    def name(self, name: str) -> None:
        """Set the name of the call that is being read. Raises `IllFormed`."""
        if self._call.name is not None or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise IllFormed
        self._call.name = name

    def arguments(self) -> Reading[None]:
        """Read the call's arguments, a JSON object, which are sent as they are written. Raises `IllFormed`."""
        if self._call.has_arguments:
            raise IllFormed
        self._call.has_arguments = self._call.verbatim = True
        self._call.copied_to = self.text.position
        yield from self.text.json_object()
        self._catch_up()
        self._call.verbatim = False

    def write(self, arguments: str) -> None:
        """Add to the arguments' JSON text, for formats that write them in some other form."""
        self._call.has_arguments = True
        self._call.unsent.append(arguments)
        self._call.end = self.text.position

    def done(self) -> None:
        """End the call, which is whole; without arguments it gets an empty object. Raises `IllFormed`."""
        if self._call.name is None:
            raise IllFormed
        if not self._call.has_arguments:
            self.write("{}")
        self._announce()
        self._stream()
        self._num_calls += 1
        self._reset()
        if self._single:
            self.ended = True
            raise IllFormed

    def skip(self) -> None:
        """Drop what was read since the opening, which begins no call."""
        self._reset()

    def back(self) -> None:
        """Unread the text since the last call."""
        self.text.rewind(self._call.start)

    # The loop.

    def _read(self) -> Reading[None]:
        while not self.ended and (yield from self._content()):
            self._reading = True
            try:
                yield from self._read_calls(self)
                self._fresh = True
            except IllFormed:
                if not self.ended:
                    self._give_up()
            self._reading = False

    def _content(self) -> Reading[bool]:
        """Send content up to the next opening of a call; return False if the text ends before one."""
        text = self.text
        while True:
            start, partial = self._start() if self._fresh else (-1, len(text.text))
            match = self._opening.search(text.text, text.at)
            opening = min(place for place in (start, match.start() if match else -1, 2**62) if place >= 0)
            end = opening if opening < 2**62 else min(partial, text.open_end(self._openers))
            space = text.before_space(end)
            if opening < 2**62:
                self._say(text.text[text.at : space])
                text.at = opening
                self._reset()
                self._call.space = text.text[space:opening]
                return True
            if text.final:
                # White space after the last call is not content.
                self._say(text.text[text.at : space if self._fresh and self._num_calls else end])
                text.at = len(text.text)
                return False
            self._say(text.text[text.at : space])
            text.at = space
            yield

    def _start(self) -> tuple[int, int]:
        """Return the place of one of the format's `starts` (-1: none), and the place from which one may still come."""
        text = self.text
        at = text.at
        while at < len(text.text) and text.text[at] in SPACE:
            at += 1
        rest = text.text[at : at + 64]
        if any(rest.startswith(start) for start in self._starts):
            return at, at
        if not text.final and any(start.startswith(rest) for start in self._starts):
            return -1, at
        self._fresh = not rest
        return -1, len(text.text)

    def _give_up(self) -> None:
        self._catch_up()
        self._stream()
        if self._call.id is None:
            text = self.text.since(self._call.start)
            self._say(self._call.space + (text if self._call.start else text.removeprefix(self._first_mark)))
        else:
            self._num_calls += 1
        self._fresh = False
        self._reset()

    def _reset(self) -> None:
        self._call = _Call(self.text.position)

    def _catch_up(self) -> None:
        if self._call.verbatim:
            self.write(self.text.since(self._call.copied_to))
            self._call.copied_to = self.text.position

    def _stream(self) -> None:
        self._catch_up()
        call = self._call
        if call.name is not None and call.has_arguments and call.end - call.start > self._hold:
            self._announce()
        if call.id is not None and (arguments := "".join(call.unsent)):
            self._out.append(ToolCall(self._num_calls, call.id, None, arguments))
            call.unsent.clear()

    def _announce(self) -> None:
        if self._call.id is None:
            self._call.id = self._new_id()
            self._out.append(ToolCall(self._num_calls, self._call.id, self._call.name, ""))

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Content(text))
