"""`ToolParser` splits an answer's text, as it comes, into reasoning, calls of tools and content.

One loop reads all three, so that they may stand in any order: a call inside the reasoning, reasoning between calls. It
sends the text up to the next mark and takes the mark's action (`_Action`).

A call that is not well-formed is text, every character of it. So a call is sent only when it is whole; but a long one
(more than `HOLD` characters, or any if a grammar guards its form) is sent as it comes, so that a client sees progress.
If such a call breaks off, its arguments end there, which is never whole JSON, and the rest is text. A call that a limit
cuts is not text: its arguments are sent as far as they go. White space next to a mark belongs to the mark. The result
depends on the text alone, never on the pieces in which it came. Knows no HTTP, and of the tools only names and
parameters. Made by `answers.new_parser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from headrace.text.outputs import CallPart, Content, MessagePart, Reasoning
from headrace.text.reasoning import NO_STYLE, Headers, Style
from headrace.text.tools.formats import NO_FORMAT, ToolFormat
from headrace.text.tools.reader import MAX_NAME, SPACE, IllFormed, Reader, Reading

HOLD = 256
MAX_HELD = 2**18
"""The most characters of a call of which nothing was sent yet; a longer one is content."""
GRID = 4096
"""Characters that are read at a time."""
GAP = "\n\n"
"""The text between two texts of one kind that something else separates."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters' JSON schemas, by the names of the tools."""

_Action = Literal["call", "open", "close", "drop", "skip"]
"""The action at a mark: begin calls or a header; begin reasoning; end it; drop the mark with the space around it, or
skip it alone."""


class AnswerForm(NamedTuple):
    """The form of an answer: the format of its calls and the marks of its reasoning. `special`: the marks that are
    special tokens, which are never content. `schemas`: the schemas of the tools that it may call."""

    tools: ToolFormat = NO_FORMAT
    style: Style = NO_STYLE
    special: frozenset[str] = frozenset()
    schemas: Schemas = MappingProxyType({})

    @property
    def headers(self) -> Headers | None:
        """The headers of families that write an answer as several messages."""
        return self.tools.headers or self.style.headers


class Bounds(NamedTuple):
    """The rules for the calls of an answer. `enforced`: a grammar guarantees that all are well-formed. `single`: the
    answer ends after its first call. `distinct`: it must be calls, and ends before a call that it has made already."""

    enforced: bool = False
    single: bool = False
    distinct: bool = False


class _Marks:
    """The marks to search for, and the action at each."""

    def __init__(self, actions: Mapping[str, _Action]) -> None:
        self.actions = actions
        self.texts = sorted((mark for mark in actions if mark), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    def find(self, text: Reader) -> tuple[int, str]:
        """Return the place of the first mark in the unread text, and the mark; without one, the place from which one
        may still come, and ""."""
        match = self._pattern.search(text.text, text.at)
        if match is None:
            return text.open_end(self.texts), ""
        rest = text.text[match.start() :]
        if not text.final and any(len(mark) > len(rest) and mark.startswith(rest) for mark in self.texts):
            # It may be the beginning of a longer mark.
            return match.start(), ""
        return match.start(), match[0]


class _Call:
    """The call that is being read. Positions count from the start of the whole text."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.space = ""
        """The white space before it."""
        self.id: str | None = None
        """Set when its first part is sent."""
        self.written_id: str | None = None
        """The id that the model wrote, for formats in which it stands for one."""
        self.name: str | None = None
        self.has_arguments = False
        """Whether its arguments have begun."""
        self.verbatim = False
        """Whether its arguments are copied from the text; the text from `copied_to` on is not copied yet."""
        self.copied_to = start
        self.unsent: list[str] = []
        """Arguments that were written and not sent."""
        self.written: list[str] = []
        """All arguments that were written, where the call must not be repeated."""
        self.end = start
        """The end of the written part of the arguments."""
        self.twins: list[str] = []
        """Arguments of earlier calls that begin with the arguments written so far, `num_written` characters."""
        self.num_written = 0


class ToolParser:
    """A `MessageParser` (see `outputs`). The reader of a format calls its other methods and reads from `text`.

    Args:
        read: reads the calls, or the header, at a mark of `form`; raises `IllFormed`.
        form: the form of the answer.
        new_id: makes the ids of calls.
        bounds: the rules for the calls.
        inside: whether the answer begins as reasoning.
    """

    def __init__(
        self,
        read: Callable[[ToolParser], Reading[None]],
        form: AnswerForm,
        new_id: Callable[[], str],
        bounds: Bounds = Bounds(),
        inside: bool = False,
    ) -> None:
        self.ended = False
        # Whether a limit has ended the text, not the model.
        self.is_limited = False
        self.text = Reader()
        self.form = form
        self.schemas = form.schemas
        self.enforced = bounds.enforced
        self._bounds = bounds
        self._read_calls = read
        self._starts = form.tools.starts_for(form.schemas)
        self._marks = {inside: _Marks(_actions(form, inside, bounds.enforced)) for inside in (False, True)}
        self._special = re.compile("|".join(map(re.escape, sorted(form.special, key=len, reverse=True))) or r"(?!)")
        self._new_id = new_id
        self._first_mark = ""
        self._out: list[MessagePart] = []
        self._num_calls = 0
        self._past_calls: list[tuple[str, str]] = []
        """Names and arguments of the calls that must not be repeated: the calls in the reasoning, or all."""
        self._inside = inside
        """Whether the text at this place is reasoning."""
        self._thought: list[str] = []
        """The reasoning since it was last opened."""
        self._has_closed = False
        """Whether a reasoning has ended."""
        self._last_kind = ""
        """The kind of the last text sent, "content" or "reasoning"; empty after a call or a mark that separates
        texts."""
        self._has_content = self._has_reasoning = False
        # Whether only white space came since the start, the last call or the last reasoning.
        self._fresh = True
        self._framed = False
        """Whether a mark that takes the space after it was read just now."""
        self._reading = False
        self._call = _Call(0)
        self._run = self._read()

    def feed(self, text: str, final: bool, cut: bool = False) -> list[MessagePart]:
        self.is_limited = cut
        # Cut at fixed places, so that a call given up for its length does not depend on the pieces.
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
        if final:
            self._answer_at_last(cut)
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

    def name(self, name: str, written_id: str | None = None) -> None:
        """Set the name of the call that is being read, and its id if the model has written one. Raises `IllFormed`."""
        if self._call.name is not None or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise IllFormed
        if self._inside and name not in self.schemas:
            # Reasoning may mention calls.
            raise IllFormed
        self._call.name, self._call.written_id = name, written_id
        self._call.twins = [arguments for past_name, arguments in self._past_calls if past_name == name]

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
        call = self._call
        call.has_arguments = True
        call.unsent.append(arguments)
        if self._bounds.distinct or self._inside:
            call.written.append(arguments)
        call.twins = [twin for twin in call.twins if twin.startswith(arguments, call.num_written)]
        call.num_written += len(arguments)
        call.end = self.text.position

    def done(self) -> None:
        """End the call, which is whole; without arguments it gets an empty object. Raises `IllFormed`."""
        call = self._call
        if call.name is None:
            raise IllFormed
        if not call.has_arguments:
            self.write("{}")
        if any(len(twin) == call.num_written for twin in call.twins):
            if self._bounds.distinct:
                self.ended = True
                raise IllFormed
            # It was made in the reasoning already.
            self._reset()
            return
        if self._bounds.distinct or self._inside:
            self._past_calls.append((call.name, "".join(call.written)))
        self._announce()
        self._stream()
        self._num_calls += 1
        self._reset()
        if self._bounds.single:
            self.ended = True
            raise IllFormed

    def skip(self) -> None:
        """Drop the text since the mark: it begins no call, or it is a part of a call that is never content."""
        name, written_id = self._call.name, self._call.written_id
        self._reset()
        self._call.name, self._call.written_id = name, written_id

    def forget(self) -> None:
        """Drop the call that is being read, of which nothing was sent."""
        self._reset()

    def back(self) -> None:
        """Unread the text since the last call."""
        self.text.rewind(self._call.start)

    def turn(self, inside: bool) -> None:
        """Read the text from here on as reasoning, or as content that starts here."""
        self._has_closed = self._has_closed or (self._inside and not inside)
        self._inside, self._fresh, self._framed = inside, True, True
        self._thought.clear()
        self._last_kind = ""

    # The loop.

    def _read(self) -> Reading[None]:
        while not self.ended and (mark := (yield from self._next_mark())) is not None:
            match self._marks[self._inside].actions.get(mark, "call"):
                case "call":
                    yield from self._read_call(mark)
                case "open" if not self._inside:
                    self.text.at += len(mark)
                    self.turn(True)
                case "close":
                    self.text.at += len(mark)
                    self.turn(False)
                case action:
                    self.text.at += len(mark)
                    self._framed = action != "drop"

    def _read_call(self, mark: str) -> Reading[None]:
        self._reading, start, num_before = True, self.text.position, self._num_calls
        try:
            yield from self._read_calls(self)
            self._fresh = self._framed = True
        except IllFormed:
            if not self.ended:
                if self.text.position == start:
                    self.text.at += len(mark)
                is_sign = bool(mark) and not mark.isalnum()
                self._give_up(is_sign or self._num_calls > num_before or self._call.name in self.schemas)
        self._reading = False

    def _next_mark(self) -> Reading[str | None]:
        """Send the text up to the next mark and return the mark, at which reading is; "" for one of `starts`. Return
        None if the text ends before a mark."""
        text, marks = self.text, self._marks[self._inside]
        while True:
            if self._framed:
                yield from text.space()
                self._framed = False
            start, partial = self._start() if self._fresh and not self._inside else (-1, len(text.text))
            place, mark = marks.find(text)
            if mark and marks.actions[mark] == "open" and not self._opens(place, mark):
                self._say(text.text[text.at : place + len(mark)])
                text.at = place + len(mark)
                continue
            if start >= 0 and (start < place or not mark):
                place, mark = start, ""
            elif not mark:
                place = min(place, partial)
            is_found = bool(mark) or start >= 0
            # A mark without meaning keeps the space before it.
            space = place if mark and marks.actions[mark] == "drop" else text.before_space(place)
            if is_found:
                self._say(text.text[text.at : space])
                before = text.text[space:place]
                text.at = place
                self._reset()
                self._call.space = before
                return mark
            if text.final:
                rest = text.text[text.at :]
                # Right after a call, or where there must be calls, the text is the beginning of a call that a limit
                # cut.
                begins = (*marks.texts, *self._starts)
                is_begun = not self._inside and any(mark.startswith(rest.strip(SPACE)) for mark in begins)
                is_after_call = self.is_limited and self._fresh and self._num_calls > 0
                if not (is_begun and (is_after_call or (self._bounds.distinct and self.enforced))):
                    self._say(rest)
                text.at = len(text.text)
                return None
            self._say(text.text[text.at : space])
            text.at = space
            yield

    def _opens(self, place: int, mark: str) -> bool:
        """Return whether a text is a mark of reasoning: after other text it is one only if it is a special token."""
        if mark in self.form.special:
            return True
        is_first = not self._thought if self._inside else self._fresh
        return is_first and not self.text.text[self.text.at : place].strip(SPACE)

    def _start(self) -> tuple[int, int]:
        """Return the place of one of the format's `starts` (-1: none), and the place from which one may still come."""
        text = self.text
        at = text.at
        while at < len(text.text) and text.text[at] in SPACE:
            at += 1
        rest = text.text[at : at + MAX_NAME + 64]
        if any(rest.startswith(start) for start in self._starts):
            return at, at
        if any(start.startswith(rest) for start in self._starts):
            return -1, at
        marks = self._marks[False].texts
        self._fresh = not rest or any(mark.startswith(rest) or rest.startswith(mark) for mark in marks)
        return -1, len(text.text)

    def _give_up(self, is_call: bool) -> None:
        """Give up the call: send the text since its mark as text. `is_call`: where a limit has cut it, it can only be a
        call. Otherwise it may be text, which can begin as some formats do, or quote a word that is a mark."""
        self._catch_up()
        is_cut = self.text.is_cut and (self.enforced or (is_call and self.is_limited and not self._inside))
        self._stream(-1 if is_cut else HOLD)
        if self._call.id is not None:
            self._num_calls += 1
        elif not is_cut:
            text = self.text.since(self._call.start)
            text = text if self._call.start else text.removeprefix(self._first_mark)
            self._say(self._call.space + self._special.sub("", text))
        if is_cut:
            # A limit cut the call: its beginning is not content.
            self.text.at = len(self.text.text)
        self._fresh = False
        self._reset()

    def _answer_at_last(self, cut: bool) -> None:
        """Send reasoning that never ended as content too, where there is no other answer: the model itself has ended
        the text, or the text came after an earlier reasoning. `cut`: a limit ended the text."""
        if self._inside and not self._has_content and not self._num_calls and (self._has_closed or not cut):
            text = "".join(self._thought).strip(SPACE)
            if text:
                self._out.append(Content(text))

    def _reset(self) -> None:
        self._call = _Call(self.text.position)

    def _catch_up(self) -> None:
        if self._call.verbatim:
            self.write(self.text.since(self._call.copied_to))
            self._call.copied_to = self.text.position

    def _stream(self, hold: int = HOLD) -> None:
        """Send the part so far of a call that is longer than `hold`, or of any call under a grammar."""
        self._catch_up()
        call, hold = self._call, -1 if self.enforced else hold
        if call.name is not None and call.has_arguments and not call.twins and call.end - call.start > hold:
            self._announce()
        if call.id is not None and (arguments := "".join(call.unsent)):
            self._out.append(CallPart(self._num_calls, call.id, None, arguments))
            call.unsent.clear()

    def _announce(self) -> None:
        if self._call.id is None:
            self._call.id = self._call.written_id or self._new_id()
            self._last_kind = ""
            self._out.append(CallPart(self._num_calls, self._call.id, self._call.name, ""))

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._inside:
            gap = GAP if self._has_reasoning and self._last_kind != "reasoning" else ""
            self._last_kind, self._has_reasoning = "reasoning", True
            self._thought.append(text)
            self._out.append(Reasoning(text, gap))
        else:
            gap = GAP if self._has_content and self._last_kind != "content" else ""
            self._last_kind, self._has_content = "content", True
            self._out.append(Content(text, gap))


def _actions(form: AnswerForm, inside: bool, enforced: bool) -> dict[str, _Action]:
    """Return the action at each mark in content, or `inside` the reasoning."""
    tools, style = form.tools, form.style
    actions: dict[str, _Action] = dict.fromkeys(form.special, "drop")
    actions |= dict.fromkeys(style.answer, "skip")
    if form.headers is None:
        actions |= dict.fromkeys(style.openings, "open")
    if inside and form.headers is None:
        actions |= dict.fromkeys(style.closings, "close")
    if not inside or (form.schemas and not enforced):
        # Under a grammar, calls in the reasoning do not count: the grammar does not cover the reasoning.
        actions |= dict.fromkeys(filter(None, tools.all_openers()), "call")
    if form.headers is not None:
        actions |= dict.fromkeys(form.headers.ends, "close")
        actions |= dict.fromkeys(form.headers.marks, "call")
    return actions
