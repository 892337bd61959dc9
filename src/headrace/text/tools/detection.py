"""Finds the format in which a model writes tool calls, by what its chat template writes for a call.

A format is the template's if its reader gets the same call back. Only where a template writes no calls, but describes
them to the model, the texts in its source decide. Called by `serve.call.dialect`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from headrace.text.outputs import MessageBuilder
from headrace.text.tools.calls import new_parser
from headrace.text.tools.formats import FORMATS, ToolFormat
from headrace.text.traits import ARGUMENTS, NAME, Traits

# The texts in a source that show a format; the first row whose texts are all there decides.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<tool_call>"), "qwen3_coder"),
    (("tool▁call▁begin",), "deepseek_v3"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("functools[",), "firefunction"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)


def detect(traits: Traits, sources: Iterable[str]) -> str | None:
    """Return the key in `FORMATS` of the format that a template with these traits and sources shows, or None."""
    if traits.call:
        return next((name for name, tool_format in FORMATS.items() if _reads(name, tool_format, traits)), None)
    text = "\n".join(sources)
    return next((name for signs, name in _SIGNS if all(sign in text for sign in signs)), None)


def _reads(name: str, tool_format: ToolFormat, traits: Traits) -> bool:
    """Whether the format's reader reads the call that the template wrote."""
    text = traits.call
    if tool_format.starts:
        # Such a call is one only at the start of an answer.
        if not text.startswith(traits.opening):
            return False
        text = text.removeprefix(traits.opening)
    message = MessageBuilder()
    for part in new_parser(name, {}).feed(text, True):
        message.add(part)
    return [(call["name"], json.loads(call["arguments"])) for call in message.calls] == [(NAME, ARGUMENTS)]
