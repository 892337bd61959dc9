"""The formats by name, and which one a model's chat template asks its model for. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import cast

from headrace.protocol.errors import RequestError
from headrace.text.tools import deepseek_v3, glm45, granite, hermes, llama3_json, mistral, pythonic, qwen3_coder
from headrace.text.tools.form import Part, Wanted
from headrace.text.tools.parser import Format, Schemas, ToolParser, call_id

FORMATS: dict[str, ModuleType] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "deepseek_v3": deepseek_v3,
    "granite": granite,
    "glm45": glm45,
}
SAME = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "deepseek_v31": "deepseek_v3",
    "glm47": "glm45",
}
"""vLLM's other names for what is one format here."""

# What of a template tells its format, the more telling first.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<tool_call>"), "qwen3_coder"),
    (("tool▁call▁begin",), "deepseek_v3"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)


def format_name(name: str) -> str:
    """The name that a format goes by here. Raises `RequestError` for one that there is not."""
    own = SAME.get(name, name)
    if own not in FORMATS:
        raise RequestError("tool_call_parser", name, "one of " + ", ".join(sorted([*FORMATS, *SAME])))
    return own


def detect(templates: Iterable[str]) -> str | None:
    """The format that chat templates show, or None."""
    text = "\n".join(templates)
    return next((name for signs, name in _SIGNS if all(sign in text for sign in signs)), None)


def marks(name: str) -> tuple[str, ...]:
    """The marks of a format that may be special tokens."""
    form = FORMATS[name]
    return (*form.openers, *getattr(form, "other_marks", ()))


def form(name: str, wanted: Wanted) -> Part:
    """The form of an answer that is one call or more, in `grammar.tags`' words."""
    made: Part = FORMATS[name].form(wanted)
    return made


def new_parser(
    name: str,
    schemas: Schemas,
    enforced: bool = False,
    new_id: Callable[[], str] | None = None,
    single: bool = False,
) -> ToolParser:
    """A parser of one answer."""
    form = FORMATS[name]
    own_id: Callable[[], str] = getattr(form, "new_id", call_id)
    return ToolParser(cast(Format, form), schemas, new_id or own_id, enforced, single)
