"""What the tests of tool calls share: parsing a text that was cut, and comparing what came out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.text.outputs import MessageBuilder, MessageParser, MessagePart
from headrace.text.reasoning import NO_STYLE, STYLES
from headrace.text.tools import answers, formats
from headrace.text.tools.parser import AnswerForm, Bounds, ToolParser

Read = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and (name, arguments) of each call."""


def tool_parser(
    form: str,
    schemas: Mapping[str, Any] | None = None,
    enforced: bool = False,
    single: bool = False,
    style: str | None = None,
    prompt: str = "",
) -> ToolParser:
    """A parser of calls in a format and of reasoning in a style, whose ids count the calls."""
    ids = (f"id{number}" for number in itertools.count())
    marks = NO_STYLE if style is None else STYLES[style]
    answer_form = AnswerForm(formats.FORMATS[form], marks, schemas=schemas or {})
    return answers.new_parser(answer_form, Bounds(enforced, single), lambda: next(ids), prompt)


def thought_parser(style: str, inside: bool, form: str | None = None, prompt: str = "") -> ToolParser:
    """A parser of an answer that begins inside the reasoning, or before it."""
    tools = formats.NO_FORMAT if form is None else formats.FORMATS[form]
    answer_form = AnswerForm(tools, STYLES[style]._replace(begins_inside=False))
    return answers.new_parser(answer_form, prompt=STYLES[style].openings[0] if inside else prompt)


def parts(parser: MessageParser, pieces: Iterable[str], cut: bool = False) -> list[MessagePart]:
    """What comes of a text in pieces; the last one ends it. `cut`: a limit did."""
    result: list[MessagePart] = []
    *most, last = list(pieces) or [""]
    for piece in most:
        result += parser.feed(piece, False)
    return result + parser.feed(last, True, cut)


def read(parser: MessageParser, pieces: Iterable[str], cut: bool = False) -> Read:
    message = MessageBuilder()
    for part in parts(parser, pieces, cut):
        message.add(part)
    return message.content, message.reasoning, [(call["name"], call["arguments"]) for call in message.calls]


def splits(text: str, num_random: int = 3, longest: int = 800) -> Iterator[list[str]]:
    """Every way to cut a text in two, letter by letter, and random cuts; of a long text only some of the first."""
    places = range(1, len(text)) if len(text) <= longest else range(1, len(text), len(text) // longest + 1)
    for place in places:
        yield [text[:place], text[place:]]
    yield list(text)
    draw = random.Random(len(text))
    for _ in range(num_random):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(2, 12)))
        yield [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
