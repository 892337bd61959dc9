"""Splits off the reasoning that a model writes before its answer, between the marks of its chat template.

Some templates open the reasoning themselves, at the end of the prompt. White space next to the marks belongs to them.
Names of the styles are vLLM's. Knows no tokens; called by `serve.call.dialect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.text import parser_names
from headrace.text.outputs import MessageParser, MessagePart, Reasoning
from headrace.text.tools.reader import Reader, Reading


class Style(NamedTuple):
    """How a family of models marks its reasoning.

    `begins_inside`: if the prompt ends with no mark, the answer begins as reasoning, without a mark. `answer`: marks
    around the answer, which belong to neither.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    begins_inside: bool = False
    answer: tuple[str, ...] = ()


THINK = ("<think>", "</think>")
"""The marks of reasoning, unless a model is known to have others."""
_THINK = Style(THINK[:1], THINK[1:])
STYLES: dict[str, Style] = {
    "qwen3": _THINK,
    "deepseek_r1": Style(*_THINK[:2], begins_inside=True),
    "mistral": Style(("[THINK]",), ("[/THINK]",)),
    "granite": Style(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "gemma4": Style(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",)),
    "command_r7b": Style(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
}
# The text in a chat template that shows its style; the first row whose text is there decides.
_SIGNS = (
    ("[THINK]", "mistral"),
    ("<|channel>thought", "gemma4"),
    ("<|START_THINKING|>", "command_r7b"),
    ("Here is my thought process:", "granite"),
    ("</think>", "qwen3"),
)


def style_name(name: str) -> str:
    """Return the key in `STYLES` of a style's name here or in vLLM. Raises `RequestError` for any other."""
    return parser_names.resolve("reasoning_parser", name, parser_names.REASONING, STYLES)


def detect(templates: Iterable[str]) -> str | None:
    """Return the key of the style that chat templates show, or None."""
    text = "\n".join(templates)
    return next((name for sign, name in _SIGNS if sign in text), None)


def marks(name: str) -> tuple[str, ...]:
    """Return the marks of a style, which may be special tokens."""
    return STYLES[name].openings + STYLES[name].closings + STYLES[name].answer


def begins_inside(name: str, prompt: str) -> bool:
    """Whether the answer to `prompt`, as the template rendered it, begins inside the reasoning."""
    style, end = STYLES[name], prompt.rstrip()
    if end.endswith(style.openings):
        return True
    return style.begins_inside and not end.endswith(style.closings)


def prefix(name: str, prompt: str, token_ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the grammar of the reasoning before the answer, as a part of `grammar.tags`; None: there is none.

    `token_ids`: those of the marks that are special tokens.
    """
    style = STYLES[name]

    def mark(text: str) -> dict[str, Any]:
        if text in token_ids:
            return {"type": "token", "token_id": token_ids[text]}
        return {"type": "const_string", "value": text}

    space = {"type": "regex", "pattern": "[ \\t\\r\\n]{0,4}"}
    rest = [{"type": "any_text"}, mark(style.closings[0]), space]
    if begins_inside(name, prompt):
        return {"type": "sequence", "elements": rest}
    if prompt.rstrip().endswith(style.closings):
        return None
    thought = {"type": "sequence", "elements": [mark(style.openings[0]), *rest]}
    return {"type": "optional", "content": thought}


class ReasoningParser:
    """A `MessageParser` (see `outputs`) that passes the text after the reasoning to `inner`.

    Only an answer's beginning can be reasoning. Reasoning that never ends leaves no content.
    """

    def __init__(self, name: str, inside: bool, inner: MessageParser) -> None:
        self._style = STYLES[name]
        self._inside = inside
        self._inner = inner
        self._text = Reader()
        self._closing = re.compile("|".join(map(re.escape, self._style.closings)))
        self._answer_mark = re.compile("|".join(map(re.escape, self._style.answer)) or r"(?!)")
        self._out: list[MessagePart] = []
        self._run = self._read()

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def feed(self, text: str, final: bool) -> list[MessagePart]:
        self._text.push(text, final, self._text.position)
        next(self._run, None)
        out, self._out = self._out, []
        return out

    def _read(self) -> Reading[None]:
        if (yield from self._opened()):
            yield from self._reasoning()
        yield from self._answer()

    def _opened(self) -> Reading[bool]:
        text = self._text
        with text.kept():
            start = text.position
            yield from text.space()
            for opening in self._style.openings:
                if (yield from text.take(opening)):
                    return True
            if not self._inside:
                text.rewind(start)
        return self._inside

    def _reasoning(self) -> Reading[None]:
        text = self._text
        yield from text.space()
        while True:
            match = self._closing.search(text.text, text.at)
            end = match.start() if match else text.open_end(self._style.closings)
            space = text.before_space(end)
            piece = text.text[text.at : space if match or not text.final else end]
            if piece:
                self._out.append(Reasoning(piece))
            if match:
                text.at = match.end()
                yield from text.space()
                return
            text.at += len(piece)
            if text.final:
                return
            yield

    def _answer(self) -> Reading[None]:
        text = self._text
        while True:
            match = self._answer_mark.search(text.text, text.at)
            end = match.start() if match else text.open_end(self._style.answer)
            piece, text.at = text.text[text.at : end], match.end() if match else end
            self._out += self._inner.feed(piece, text.final and match is None)
            if match is None:
                if text.final:
                    return
                yield
