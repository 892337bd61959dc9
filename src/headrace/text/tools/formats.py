"""The table of the formats in which models write tool calls.

`calls` reads a format, `call_grammar` writes it, `detection` finds the format of a model. A new format is a row here;
only a new way to write a call's name and arguments needs code, in `calls` and `call_grammar`. Names are vLLM's where it
has them. Holds no code that reads text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from headrace.text import parser_names
from headrace.text.reasoning import HARMONY, MUSE, Headers

Body = Literal["json", "keyed", "named", "fenced", "tagged", "xml", "python", "bare"]
"""The form of the name and the arguments of a call:

- json: `{"name": ..., "arguments": {...}}`
- keyed: `{name: {...}}`, with the arguments under the name
- named: the name, then the arguments as a JSON object
- fenced: as named, or with the arguments in a Markdown block and `function` as the kind of the call
- tagged: the name, then each argument between tags; strings bare, anything else as JSON
- xml: the name, then each argument between tags of its name, as are the members of objects and `item`s of lists
- python: `name(key=value, ...)`, with Python literals
- bare: `name{key:value, ...}`, with JSON whose keys are bare and whose strings stand between other quotes
"""


class Layout(NamedTuple):
    """One way in which a format writes calls. Texts are as a model writes them; white space around them may differ."""

    body: Body
    marks: Literal["around all", "around each", "read only"] = "around all"
    """The places of the format's marks; `read only` marks are optional in answers, and never written."""
    brackets: bool = False
    """Whether the calls are a list in square brackets."""
    separator: str = ""
    """Written between calls."""
    begins: str = ""
    """A format is read by the first of its layouts whose `begins` follows the mark, apart from white space."""
    in_template: str = ""
    """A format is written by the layout that has the longest of these texts that the chat template holds."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    """For json: the key that is written; both `arguments` and `parameters` are read."""
    id_key: str = ""
    """For json: the key of the call's number, which is written before its name and skipped."""
    name: tuple[str, str] = ("", "")
    """For named, fenced, tagged, xml and bare: the texts around the name. For python: the text after it, which is only
    read. For json: the text before the object."""
    name_pattern: re.Pattern[str] | None = None
    """For named, tagged and bare: the pattern of a name; None: a name is all up to the text after it."""
    id_mark: str = ""
    """For named: the text before an id, which may come after the name; only read."""
    is_numbered: bool = False
    """For named: whether the name stands in an id, `functions.NAME:NUMBER`, which becomes the call's id."""
    end: str = ""
    """For json, named, fenced, tagged and xml: the text after the arguments."""
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    """For tagged: the texts around the name of an argument and around its value. For bare: `value` around a string."""
    says_type: tuple[str, str] = ("", "")
    """For tagged: the texts around `true` or `false`, which mark an argument as a string or not, after its name."""
    tag: str = ""
    """For xml: the text before each tag."""
    header: tuple[str, str] = ("", "")
    """The texts around the tool's name in a header before the call; only written."""


def call_id() -> str:
    """Return a fresh id, which looks like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return nine letters or digits: Mistral's templates take no other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolFormat(NamedTuple):
    """The form in which a family of models writes calls."""

    layouts: tuple[Layout, ...]
    marks: tuple[str, str] = ("", "")
    """The texts before and after a call or a list of calls (see `Layout.marks`)."""
    openers: tuple[str, ...] = ()
    """Further texts that begin calls wherever they stand, as the first of `marks` does."""
    others: tuple[str, ...] = ()
    """Texts that may replace the first of `marks`; only read."""
    starts: tuple[str, ...] = ()
    """Texts that begin calls only at the start of the answer, or right after another call."""
    special: tuple[str, ...] = ()
    """Further texts that may be special tokens."""
    content: str = ""
    """The text after the first of `marks` that begins content instead of a call."""
    in_prompt: str = ""
    """The mark at the end of some prompts, after which the answer begins; in the answer it precedes each further
    call."""
    new_id: Callable[[], str] = call_id
    headers: Headers | None = None
    """The headers of families that write an answer as several messages."""
    starts_with_name: bool = False
    """Whether a line with only a tool's name begins calls where `starts` do."""

    def all_openers(self) -> tuple[str, ...]:
        return (self.marks[0].strip(), *self.others, *self.openers)

    def starts_for(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the texts that begin calls of the tools with these names at the start of the answer."""
        named = [f"{name}{space}" for name in names for space in ("\n", " \n")] if self.starts_with_name else []
        return (*self.starts, *named)

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts of the format that may be special tokens."""
        headers = () if self.headers is None else self.headers.special_texts()
        return tuple(filter(None, (*self.all_openers(), self.marks[1].strip(), *self.special, *headers)))


NO_FORMAT = ToolFormat(())
_FUNCTION = Layout(
    "tagged",
    "around each",
    separator="\n",
    name=("<function=", ">\n"),
    end="</function>",
    key=("<parameter=", ">"),
    value=("\n", "\n</parameter>"),
)
_JSON_LIST = Layout("json", brackets=True, separator=", ")
_PYTHON_LIST = Layout("python", brackets=True, separator=", ")
_DEEPSEEK_MARKS = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = Layout("named", name=_DEEPSEEK_MARKS[:2], end=_DEEPSEEK_MARKS[2])
NAMESPACE = "functions."
"""The text that some formats write before a tool's name."""
_KIMI_MARKS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MINIMAX = "]<]minimax[>["


def _dsml(block: str) -> ToolFormat:
    """Return the format of DeepSeek's V3.2 and later, whose calls stand in a `block`."""
    layout = Layout(
        "tagged",
        name=('<｜DSML｜invoke name="', '">\n'),
        end="</｜DSML｜invoke>\n",
        key=('<｜DSML｜parameter name="', '"'),
        says_type=(' string="', '">'),
        value=("", "</｜DSML｜parameter>"),
    )
    marks = f"<｜DSML｜{block}>\n", f"</｜DSML｜{block}>"
    return ToolFormat((layout,), marks, openers=("<｜DSML｜invoke",), special=("｜DSML｜",))


def _hunyuan(suffix: str) -> ToolFormat:
    """Return the format of Hy 3, whose tags have a suffix in the published weights."""

    def tags(name: str) -> tuple[str, str]:
        return f"<{name}{suffix}>", f"</{name}{suffix}>"

    call, key, value, calls = tags("tool_call"), tags("arg_key"), tags("arg_value"), tags("tool_calls")
    between = f"<tool_sep{suffix}>"
    layout = Layout(
        "tagged", name=(call[0], f"{between}\n"), end=f"{call[1]}\n", key=(key[0], key[1] + "\n"), value=value
    )
    marks = f"{calls[0]}\n", calls[1]
    return ToolFormat((layout,), marks, special=(*call, between, *key, *value))


FORMATS: dict[str, ToolFormat] = {
    # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others.
    "hermes": ToolFormat((Layout("json", "around each", separator="\n"),), marks=("<tool_call>\n", "\n</tool_call>")),
    # Qwen 3 Coder, Qwen 3.5 and later, Nemotron 3.
    "qwen3_coder": ToolFormat(
        (_FUNCTION,),
        marks=("<tool_call>\n", "\n</tool_call>"),
        openers=("<function=",),
    ),
    # Llama 3.1 to 3.3, and Llama 4 with its own template. The built-in tools are written in another way.
    "llama3_json": ToolFormat(
        (
            Layout("json", "read only", separator="; ", begins="{", arguments_key="parameters"),
            Layout("python", "around each", name=("", ".call")),
        ),
        marks=("<|python_tag|>", ""),
        # Llama 4's template writes text before a call between the second and the third of these.
        others=("<|python_start|><|python_end|>", "<|python_start|>", "<|python_end|>"),
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
    # Llama 3.2, Llama 4 (which writes the marks) with vLLM's template, and others.
    "pythonic": ToolFormat(
        (_PYTHON_LIST._replace(marks="read only"),),
        marks=("<|python_start|>", "<|python_end|>"),
        starts=("[",),
    ),
    # DeepSeek: V3 and R1 with fences, V3.1 without.
    "deepseek_v3": ToolFormat(
        (
            # Some templates write calls as JSON.
            Layout(
                "json",
                separator="\n",
                begins=_DEEPSEEK_MARKS[0] + "{",
                in_template=_DEEPSEEK_MARKS[0] + ' {"name":',
                name=(_DEEPSEEK_MARKS[0], ""),
                end=_DEEPSEEK_MARKS[2],
            ),
            _DEEPSEEK._replace(body="fenced", in_template="```json", separator="\n"),
            _DEEPSEEK,
        ),
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
                header=(" to=", "<|message|>"),
            ),
        ),
        # Without the newline before it, a grammar can distinguish it from a separator.
        marks=("<atem:function_calls>\n", "</atem:function_calls>"),
        headers=MUSE,
    ),
    # gpt-oss: a message to each tool (see `reasoning`).
    "openai": ToolFormat(
        (
            Layout(
                "named",
                "around each",
                name=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
                name_pattern=re.compile(r"[^\s<>{}\"]+"),
            ),
        ),
        headers=HARMONY,
    ),
    # LFM2: as Python or as JSON.
    "lfm2": ToolFormat(
        (_JSON_LIST._replace(begins="[{", in_template='<|tool_call_start|>[{"'), _PYTHON_LIST),
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    # Kimi K2.
    "kimi_k2": ToolFormat(
        (
            Layout(
                "named",
                name=(_KIMI_MARKS[0] + NAMESPACE, _KIMI_MARKS[1]),
                is_numbered=True,
                end=_KIMI_MARKS[2],
            ),
        ),
        marks=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        openers=_KIMI_MARKS[:1],
        special=_KIMI_MARKS[1:],
    ),
    # MiniMax M2.
    "minimax_m2": ToolFormat(
        (
            Layout(
                "tagged",
                name=('<invoke name="', '">\n'),
                end="</invoke>\n",
                key=('<parameter name="', '">'),
                value=("", "</parameter>"),
            ),
        ),
        marks=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    # MiniMax M3.
    "minimax_m3": ToolFormat(
        (
            Layout(
                "xml",
                name=(f'{_MINIMAX}<invoke name="', '">'),
                end=f"{_MINIMAX}</invoke>\n",
                tag=_MINIMAX,
            ),
        ),
        marks=(f"{_MINIMAX}<tool_call>\n", f"{_MINIMAX}</tool_call>"),
        special=(_MINIMAX,),
    ),
    # Nemotron Nano 2.
    "nemotron_json": ToolFormat((_JSON_LIST,), marks=("<TOOLCALL>", "</TOOLCALL>")),
    # OLMo 3.
    "olmo3": ToolFormat((Layout("python", separator="\n"),), marks=("<function_calls>", "</function_calls>")),
    # Hunyuan, Apriel.
    "hunyuan_a13b": ToolFormat((_JSON_LIST,), marks=("<tool_calls>", "</tool_calls>")),
    # Hy 3.
    "hy_v3": _hunyuan(":opensource"),
    "hy_v3_plain": _hunyuan(""),
    # Apertus.
    "apertus": ToolFormat(
        (Layout("keyed", brackets=True, separator=", "),), marks=("<|tools_prefix|>", "<|tools_suffix|>")
    ),
    # GLM 4: the tool's name on the first line of the answer.
    "glm4": ToolFormat(
        (Layout("named", "around each", separator="\n", name=("", "\n"), name_pattern=re.compile(r"[^\s{}\"]+")),),
        starts_with_name=True,
    ),
    # Seed-OSS.
    "seed_oss": ToolFormat(
        (_FUNCTION._replace(value=("", "</parameter>")),),
        marks=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        openers=("<function=",),
    ),
    # DeepSeek V3.2, V4.
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    # Phi-4-mini.
    "phi4_mini_json": ToolFormat(
        (
            _JSON_LIST._replace(begins="["),
            Layout("json", "around each", separator="\n", begins="{", in_template='<|tool_call|>{"'),
        ),
        marks=("<|tool_call|>", "<|/tool_call|>"),
        others=("functools",),
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
