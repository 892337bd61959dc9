"""The table of the formats in which models write tool calls.

`calls` reads a format, `call_grammar` writes it, `detection` finds that of a model. A new format is a row here; only a
new way to write a call's name and arguments needs code, there. Names are vLLM's where it has them. Holds no code that
reads text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from typing import Literal, NamedTuple

from headrace.text import parser_names

Body = Literal["json", "named", "fenced", "tagged", "python", "bare"]
"""How the name and the arguments of a call are written:

- json: `{"name": ..., "arguments": {...}}`
- named: the name, then the arguments as a JSON object
- fenced: as named, or with the arguments in a Markdown block and `function` as the kind of the call
- tagged: the name, then each argument between tags; strings bare, anything else as JSON
- python: `name(key=value, ...)`, with Python literals
- bare: `name{key:value, ...}`, with JSON whose keys are bare and whose strings stand between other quotes
"""


class Layout(NamedTuple):
    """One way in which a format writes calls. Texts are as a model writes them; white space around them may differ."""

    body: Body
    marks: Literal["around all", "around each", "read only"] = "around all"
    """Where the format's marks stand; those that are `read only` are not needed, and never written."""
    brackets: bool = False
    """Whether the calls are a list in square brackets."""
    separator: str = ""
    """Written between calls."""
    begins: str = ""
    """A format is read by the first of its layouts that begins with what comes after the mark."""
    in_template: str = ""
    """A format is written by the layout that has the longest of these texts that the chat template holds."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    """For json: written; both `arguments` and `parameters` are read."""
    id_key: str = ""
    """For json: the key of the call's number, which is written before its name and skipped."""
    name: tuple[str, str] = ("", "")
    """For named, fenced, tagged and bare: the texts around the name. For python: the text after it, which is only
    read."""
    name_pattern: re.Pattern[str] | None = None
    """For named, tagged and bare: what a name is; None: all up to the text after it."""
    id_mark: str = ""
    """For named: the text before an id, which may come after the name; only read."""
    end: str = ""
    """For named, fenced and tagged: the text after the arguments."""
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    """For tagged: the texts around the name of an argument and around its value. For bare: `value` around a string."""


def call_id() -> str:
    """Return a fresh id, which looks like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return nine letters or digits: Mistral's templates take no other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolFormat(NamedTuple):
    """How a family of models writes calls."""

    layouts: tuple[Layout, ...]
    marks: tuple[str, str] = ("", "")
    """The texts before and after a call or a list of calls (see `Layout.marks`)."""
    openers: tuple[str, ...] = ()
    """What begins calls wherever it stands, besides the first of `marks`."""
    starts: tuple[str, ...] = ()
    """What begins calls only at the start of the answer, or right after another call."""
    special: tuple[str, ...] = ()
    """Further texts that may be special tokens."""
    content: str = ""
    """What comes after the first of `marks` before content that is no call."""
    in_prompt: str = ""
    """The mark that a prompt may end with, after which the answer begins; it comes before each further call."""
    new_id: Callable[[], str] = call_id

    def all_openers(self) -> tuple[str, ...]:
        return (self.marks[0].strip(), *self.openers)

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts of the format that may be special tokens."""
        return tuple(text for text in (*self.all_openers(), self.marks[1].strip(), *self.special) if text)


_JSON_LIST = Layout("json", brackets=True, separator=", ")
_DEEPSEEK_MARKS = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = Layout("named", name=_DEEPSEEK_MARKS[:2], end=_DEEPSEEK_MARKS[2])

FORMATS: dict[str, ToolFormat] = {
    # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others.
    "hermes": ToolFormat((Layout("json", "around each", separator="\n"),), marks=("<tool_call>\n", "\n</tool_call>")),
    # Qwen 3 Coder, Qwen 3.5 and later, Nemotron 3.
    "qwen3_coder": ToolFormat(
        (
            Layout(
                "tagged",
                "around each",
                separator="\n",
                name=("<function=", ">\n"),
                end="</function>",
                key=("<parameter=", ">"),
                value=("\n", "\n</parameter>"),
            ),
        ),
        marks=("<tool_call>\n", "\n</tool_call>"),
        openers=("<function=",),
    ),
    # Llama 3.1 to 3.3. The built-in tools are written in another way.
    "llama3_json": ToolFormat(
        (
            Layout("json", "read only", separator="; ", begins="{", arguments_key="parameters"),
            Layout("python", "around each", name=("", ".call")),
        ),
        marks=("<|python_tag|>", ""),
        starts=("{",),
    ),
    # Mistral: a list with its tokenizers up to v7; from v11 on each call by itself.
    "mistral": ToolFormat(
        (
            _JSON_LIST._replace(begins="["),
            Layout(
                "named",
                "around each",
                in_template="[ARGS]",
                name=("", "[ARGS]"),
                name_pattern=re.compile(r"[^\s\[\]{}\"]+"),
                id_mark="[CALL_ID]",
            ),
        ),
        marks=("[TOOL_CALLS]", ""),
        special=("[ARGS]", "[CALL_ID]"),
        new_id=_short_id,
    ),
    # Llama 3.2, Llama 4 (which writes the marks), and others.
    "pythonic": ToolFormat(
        (Layout("python", "read only", brackets=True, separator=", "),),
        marks=("<|python_start|>", "<|python_end|>"),
        starts=("[",),
    ),
    # DeepSeek: V3 and R1 with fences, V3.1 without.
    "deepseek_v3": ToolFormat(
        (_DEEPSEEK._replace(body="fenced", in_template="```json", separator="\n"), _DEEPSEEK),
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        openers=_DEEPSEEK_MARKS[:1],
        special=_DEEPSEEK_MARKS[1:],
    ),
    # Granite 3.
    "granite": ToolFormat((_JSON_LIST,), marks=("<|tool_call|>", "")),
    # FireFunction v2.
    "firefunction": ToolFormat((_JSON_LIST,), marks=("functools", "")),
    # Functionary v3.1.
    "functionary_v31": ToolFormat(
        (Layout("named", "around each", name=("", ">")),), marks=("<function=", "</function>")
    ),
    # Functionary v3.2: each part of an answer has its receiver, `all` or a tool.
    "functionary_v32": ToolFormat(
        (Layout("named", "around each", name=("", "\n"), name_pattern=re.compile(r"[\w.\-]+")),),
        marks=(">>>", ""),
        content="all\n",
        in_prompt=">>>",
    ),
    # Command R7B.
    "command_r7b": ToolFormat(
        (_JSON_LIST._replace(name_key="tool_name", arguments_key="parameters", id_key="tool_call_id"),),
        marks=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    # Muse Glimmer.
    "muse_glimmer": ToolFormat(
        (
            Layout(
                "tagged",
                separator="\n",
                name=('<atem:invoke name="', '">\n'),
                end="</atem:invoke>",
                key=('<atem:parameter name="', '">'),
                value=("", "</atem:parameter>"),
            ),
        ),
        # Without the newline before it, a grammar can tell it from a separator.
        marks=("<atem:function_calls>\n", "</atem:function_calls>"),
    ),
    # Gemma 4.
    "gemma4": ToolFormat(
        (
            Layout(
                "bare",
                "around each",
                name=("call:", ""),
                name_pattern=re.compile(r"[^\s{}:\"]+"),
                value=('<|"|>', '<|"|>'),
            ),
        ),
        marks=("<|tool_call>", "<tool_call|>"),
        special=('<|"|>',),
    ),
    # GLM 4.5 and later, Laguna.
    "glm45": ToolFormat(
        (
            Layout(
                "tagged",
                "around each",
                separator="\n",
                name=("", "\n"),
                end="</tool_call>",
                name_pattern=re.compile(r"[^\s<>{}\"]+"),
                key=("<arg_key>", "</arg_key>\n"),
                value=("<arg_value>", "</arg_value>"),
            ),
        ),
        marks=("<tool_call>", ""),
        special=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
}


def format_name(name: str) -> str:
    """Return the key in `FORMATS` of a format's name here or in vLLM. Raises `RequestError` for any other."""
    return parser_names.resolve("tool_call_parser", name, parser_names.TOOL_CALLS, FORMATS)
