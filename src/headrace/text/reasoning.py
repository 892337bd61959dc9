"""The table of the ways in which models mark their reasoning, and the grammar of the reasoning before an answer.

`tools.parser` reads it. Some templates open the reasoning themselves, at the end of the prompt. Names of the styles are
vLLM's. Knows no tokens; called by `serve.call.dialect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.text import parser_names


class Headers(NamedTuple):
    """The form in which a family of models writes an answer as several messages, each with a header that gives its
    kind: `marks` begin a header or stand in it, and `begins` is the first mark of a message; `body` ends the header.
    `ends` stand after a message. `channel` comes before the name of a channel, if there are channels."""

    begins: str
    body: str
    ends: tuple[str, ...]
    channel: str = ""
    constraint: str = ""
    """The mark that may precede the form of the message's text."""
    calls: str = ""
    """The text before the name of a tool to which a message is sent: the message holds the arguments of the tool's
    call."""
    last: tuple[str, ...] = ()
    """The `ends` that end the whole answer."""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begins, self.channel, self.body)))

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts that may be special tokens."""
        return tuple(filter(None, (*self.marks, *self.ends, self.constraint)))


class Style(NamedTuple):
    """The marks of a family of models around its reasoning.

    `begins_inside`: if the prompt ends with no mark, the answer begins as reasoning, without a mark. `answer`: marks
    around the answer, which belong to neither text. `headers`: only for families that write messages.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    begins_inside: bool = False
    answer: tuple[str, ...] = ()
    headers: Headers | None = None
    before_content: str = ""
    """The text that the model writes before an answer that is no call."""
    between: str = ""
    """The text that the model writes between the end of the reasoning and the rest of the answer."""

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts that may be special tokens."""
        if self.headers is not None:
            return self.headers.special_texts()
        return self.openings + self.closings + self.answer


NO_STYLE = Style((), ())
THINK = ("<think>", "</think>")
"""The marks of reasoning, unless a model is known to have others."""
_THINK = Style(THINK[:1], THINK[1:])
HARMONY = Headers(
    "<|start|>",
    "<|message|>",
    ("<|end|>", "<|call|>", "<|return|>"),
    channel="<|channel|>",
    constraint="<|constrain|>",
    calls="functions.",
    last=("<|call|>", "<|return|>"),
)
MUSE = Headers("<|start|>", "<|message|>", ("<|eom|>", "<|eot|>"), last=("<|eot|>",))
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
    # Hunyuan.
    "hunyuan_a13b": Style(*_THINK[:2], answer=("<answer>", "</answer>")),
    # ERNIE 4.5.
    "ernie45": Style(*_THINK[:2], answer=("<response>", "</response>")),
    # Hy 3, whose marks have a suffix.
    "hy_v3": Style(("<think:opensource>",), ("</think:opensource>",)),
    "seed_oss": Style(("<seed:think>",), ("</seed:think>",)),
    "minimax_m3": Style(("<mm:think>",), ("</mm:think>",)),
    "apertus": Style(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    # gpt-oss: messages of the channels analysis, commentary and final.
    "openai_gptoss": Style(
        ("<|channel|>analysis<|message|>",),
        ("<|end|>",),
        headers=HARMONY,
        before_content="<|channel|>final<|message|>",
        between="<|start|>assistant",
    ),
    # Muse Glimmer: messages to itself, to the user and to tools.
    "muse_glimmer": Style(
        (" to=self<|message|>",),
        ("<|eom|>",),
        headers=MUSE,
        before_content=" to=user<|message|>",
        between="<|start|>assistant",
    ),
}
# The texts in a chat template that show its style; the first row whose texts are all there decides.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>analysis<|message|>",), "openai_gptoss"),
    ((" to=self<|message|>",), "muse_glimmer"),
    (("[THINK]",), "mistral"),
    (("<|channel>thought",), "gemma4"),
    (("<|START_THINKING|>",), "command_r7b"),
    (("Here is my thought process:",), "granite"),
    (("seed:think>",), "seed_oss"),
    (("mm:think>",), "minimax_m3"),
    (("<think{}>'.format(", ":opensource"), "hy_v3"),
    (("<think:opensource>",), "hy_v3"),
    (("<|inner_prefix|>",), "apertus"),
    (("<minimax:tool_call>",), "qwen3"),
    (("</think>", "</response>"), "ernie45"),
    (("</think>", "</answer>"), "hunyuan_a13b"),
    (("</think>", "<|extra_0|>"), "hunyuan_a13b"),
    (("</think>", "<｜hy_Assistant｜>"), "hunyuan_a13b"),
    (("</think>",), "qwen3"),
)


def style_name(name: str) -> str:
    """Return the key in `STYLES` of a style's name here or in vLLM. Raises `RequestError` for any other."""
    return parser_names.resolve("reasoning_parser", name, parser_names.REASONING, STYLES)


def detect(templates: Iterable[str]) -> str | None:
    """Return the key of the style that chat templates show, or None."""
    return shown(_SIGNS, "\n".join(templates))


def shown(rows: Iterable[tuple[tuple[str, ...], str]], text: str) -> str | None:
    """Return the name of the first row whose texts are all in `text`, or None."""
    return next((name for signs, name in rows if all(sign in text for sign in signs)), None)


def marks(name: str) -> tuple[str, ...]:
    """Return the marks of a style, which may be special tokens."""
    return STYLES[name].special_texts()


def begins_inside(style: Style, prompt: str) -> bool:
    """Return whether the answer to `prompt`, as the template rendered it, begins inside the reasoning."""
    end = prompt.rstrip()
    if style.openings and end.endswith(style.openings):
        return True
    return style.begins_inside and not end.endswith(style.closings)


def prefix(name: str, prompt: str, token_ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the grammar of the reasoning before the answer, as a part of `grammar.tags`; None: there is none.

    `token_ids`: the ids of the marks that are special tokens.
    """
    style = STYLES[name]
    spaces = [] if style.headers is not None else [{"type": "regex", "pattern": "[ \\t\\r\\n]{0,4}"}]
    rest = [{"type": "any_text"}, *spelled(style.closings[0] + style.between, token_ids), *spaces]
    if begins_inside(style, prompt):
        return {"type": "sequence", "elements": rest}
    if prompt.rstrip().endswith(style.closings):
        return None
    thought = {"type": "sequence", "elements": [*spelled(style.openings[0], token_ids), *rest]}
    return {"type": "optional", "content": thought}


def spelled(text: str, token_ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return `text` as parts of `grammar.tags`, with the special tokens in it."""
    first = min(((at, mark) for mark in token_ids if (at := text.find(mark)) >= 0), default=None)
    if first is None:
        return [{"type": "const_string", "value": text}] if text else []
    at, mark = first
    token = {"type": "token", "token_id": token_ids[mark]}
    return [*spelled(text[:at], token_ids), token, *spelled(text[at + len(mark) :], token_ids)]
