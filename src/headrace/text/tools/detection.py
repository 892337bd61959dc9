"""Finds the format in which a model writes tool calls, from the text that its chat template writes for a call.

The template has a format if the format's reader reads the same call from the text. Only where a template writes no
calls, but describes them to the model, the texts in its source decide. Called by `serve.call.dialect`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from headrace.text.histories import plain
from headrace.text.messages import PastCall
from headrace.text.outputs import MessageBuilder, MessageParser
from headrace.text.reasoning import shown
from headrace.text.tools.answers import new_parser
from headrace.text.tools.formats import FORMATS
from headrace.text.tools.parser import AnswerForm
from headrace.text.tools.response_templates import ResponseTemplate
from headrace.text.tools.whole_parser import REASONING, WholeForm, WholeParser
from headrace.text.traits import ARGUMENTS, NAME, Traits

# The texts in a source that show a format; the first row whose texts are all there decides.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>commentary", "<|message|>"), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("｜DSML｜function_calls",), "deepseek_v32"),
    (("｜DSML｜", "tool_calls"), "deepseek_v4"),
    (("<arg_key>",), "glm45"),
    (("seed:tool_call",), "seed_oss"),
    (("<function=", "<tool_call>"), "qwen3_coder"),
    (("tool▁call▁begin",), "deepseek_v3"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi4_mini_json"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: ", "<|im_start|>"), "lfm2"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|tools_prefix|>",), "apertus"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("functools[", "<|end|>"), "phi4_mini_json"),
    (("functools[",), "firefunction"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("[gMASK]<sop>", "tools"), "glm4"),
)
DESCRIBED = "functools["
"""A mark that vLLM's template of Phi-4-mini describes to the model, though it writes calls of earlier turns bare."""


def detect(traits: Traits, sources: Iterable[str]) -> str | None:
    """Return the key in `FORMATS` of the format that a template with these traits and sources shows, or None.

    Of several formats whose readers read the call, it is the one that leaves the least other text."""
    text = "\n".join(sources)
    named = shown(_SIGNS, text)
    if not traits.call:
        return named if named is None or reads_shown(named, traits) else None
    rests = {name: rest for name in FORMATS if (rest := _rest(name, traits)) is not None}
    read = min(rests, key=lambda name: (rests[name], name != named), default=None)
    return named if read is not None and FORMATS[read].starts and DESCRIBED in text else read


def reads_shown(name: str, traits: Traits) -> bool:
    """Return whether the format's reader reads calls in the form that a prompt shows where the template has no place
    for tools; True for other templates."""
    if traits.shows_tools:
        return True
    if not traits.call:
        call = plain.call_text(PastCall.of("", NAME, json.dumps(ARGUMENTS), ""))
        traits = replace(traits, call=call, opening="")
    return _rest(name, traits) is not None


def _rest(name: str, traits: Traits) -> int | None:
    """Return the number of characters outside the call that the template wrote, if the format's reader reads the
    call."""
    tool_format, text = FORMATS[name], traits.call
    if tool_format.starts or tool_format.starts_with_name:
        # Calls in such a format are found only at the start of an answer.
        if not text.startswith(traits.opening):
            return None
        text = text.removeprefix(traits.opening)
    content, _, calls = _read(new_parser(AnswerForm(tool_format, schemas={NAME: {}})), text)
    # Some templates write every argument as a text.
    texts = {key: str(value) for key, value in ARGUMENTS.items()}
    return len(content) if calls in ([(NAME, ARGUMENTS)], [(NAME, texts)]) else None


def same_as_rows(template: ResponseTemplate, rows: AnswerForm, traits: Traits) -> bool:
    """Return whether our own tables read the answers that a chat template shows as the response template does, so that
    an answer can be read, and sent, while it is generated."""
    rows = rows._replace(schemas={NAME: {}})
    marks, text = rows.style.openings[:1] + rows.style.closings[:1], traits.call.removeprefix(traits.opening)
    rest, _, calls = _read(new_parser(rows), text)
    if calls != [(NAME, ARGUMENTS)] or bool(template.fields.keys() & set(REASONING)) != bool(marks) or rows.headers:
        return False
    call = text.rstrip().removesuffix(rest.strip()).strip()
    thought = f"{marks[0]}\nWhy?\n{marks[1]}\n\n" if marks else ""
    tries = []
    for answer in ("Xanadu.\n\nThere.", call, f"{call}\n{call}", f"So:\n\n{call}"):
        tries += [(traits.opening, answer), (traits.opening, thought + answer)]
        if marks:
            tries.append((f"{traits.opening}{marks[0]}\n", thought.removeprefix(f"{marks[0]}\n") + answer))
    return all(_reads_alike(template, rows, prompt, text) for prompt, text in tries)


def _reads_alike(template: ResponseTemplate, rows: AnswerForm, prompt: str, text: str) -> bool:
    whole = WholeParser(WholeForm(template, schemas=rows.schemas), prompt)
    one, other = (_read(parser, text) for parser in (whole, new_parser(rows, prompt=prompt)))
    return [part.strip() for part in one[:2]] == [part.strip() for part in other[:2]] and one[2] == other[2]


def _read(parser: MessageParser, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the content, the reasoning and the calls of an answer."""
    message = MessageBuilder()
    for part in parser.feed(text, True):
        message.add(part)
    calls = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
    return message.content, message.reasoning, calls
