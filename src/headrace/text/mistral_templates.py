"""Chat templates by the versions of Mistral's own tokenizer files, which come without a template.

A version fixes how messages, tools, calls and results are written (mistral-common); the templates here say the same in
Jinja. With a SentencePiece model the tokenizer puts a space before each text between control tokens, so that no
template writes one. Knows no requests; called by the readers of those files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from headrace.protocol.errors import CheckpointError

VERSIONS = (1, 2, 3, 7, 11, 13, 15)

_TURNS = """
{%- set ns = namespace(first=-1, last=-1, role='', system='') -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if ns.role == 'user' -%}{{- raise_exception('user messages follow one another') -}}{%- endif -%}
    {%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}
    {%- set ns.last = loop.index0 -%}
  {%- endif -%}
  {%- if message.role == 'system' -%}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message.content -%}
  {%- elif message.role in ['user', 'assistant', 'tool'] -%}
    {%- if ns.role == 'assistant' == message.role -%}
      {{- raise_exception('assistant messages follow one another') -}}
    {%- endif -%}
    {%- set ns.role = message.role -%}
  {%- else -%}
    {{- raise_exception('no role ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
"""
"""Finds the first and last user message and joins the system messages; begins the loop over the messages."""
_TOOLS = """
{%- if loop.index0 == ns.@WHERE@ and tools -%}
  {{- '[AVAILABLE_TOOLS][' -}}
  {%- for tool in tools -%}
    {%- set function = tool.function -%}
    {{- {'type': 'function', 'function': {'name': function.name, 'description': function.description or '',
        'parameters': function.parameters or {}}} | tojson -}}
    {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
  {%- endfor -%}
  {{- '][/AVAILABLE_TOOLS]' -}}
{%- endif -%}
"""
_EFFORT = """
{%- if loop.index0 == ns.first -%}
  {%- set effort = reasoning_effort or @DEFAULT@ -%}
  {%- if effort not in @LEVELS@ -%}{{- raise_exception('reasoning_effort is ' ~ effort) -}}{%- endif -%}
  {{- '[MODEL_SETTINGS]' + {'reasoning_effort': effort} | tojson + '[/MODEL_SETTINGS]' -}}
{%- endif -%}
"""
_USER_1 = """
{%- if message.role == 'user' -%}
  {{- '[INST] ' + (ns.system + '\\n\\n' if ns.system and loop.index0 == ns.first else '') + message.content -}}
  {{- ' [/INST]' -}}
"""
_USER_2 = """
{%- if message.role == 'user' -%}
  @TOOLS@
  {{- '[INST]' + (ns.system + '\\n\\n' if ns.system and loop.index0 == ns.last else '') + message.content -}}
  {{- '[/INST]' -}}
"""
_USER_7 = """
{%- if message.role == 'system' -%}
  {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
{%- elif message.role == 'user' -%}
  @TOOLS@@EFFORT@
  {{- '[INST]' + message.content + '[/INST]' -}}
"""
_ANSWER_1 = """
{%- elif message.role == 'assistant' -%}
  {%- if message.tool_calls -%}{{- raise_exception('tool calls are not supported') -}}{%- endif -%}
  {{- ' ' + message.content + eos_token -}}
{%- elif message.role == 'tool' -%}
  {{- raise_exception('tool results are not supported') -}}
{%- endif -%}
{%- endfor -%}
"""
_ANSWER_2 = """
{%- elif message.role == 'assistant' and (not message.tool_calls or @SHOWN@) -%}
  {%- if message.tool_calls and message.content and not @MIXED@ -%}
    {{- raise_exception('a message has both text and tool calls') -}}
  {%- endif -%}
  @THINK@
  {{- (message.content or '').rstrip(' ') -}}
  {%- for call in message.tool_calls or [] -%}
    {%- set call_id = call.id -%}@CHECK@
  {%- endfor -%}
  {%- if message.tool_calls -%}
    @CALLS@
  {%- endif -%}
  {{- eos_token -}}
{%- elif message.role == 'tool' and @SHOWN@ -%}
  {%- set call_id = message.tool_call_id -%}@CHECK@
  {{- '[TOOL_RESULTS]' -}}@RESULT@{{- '[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}
"""
_THINK = """
{%- if message.reasoning_content -%}{{- '[THINK]' + message.reasoning_content + '[/THINK]' -}}{%- endif -%}
"""
_CHECK = """
{%- if call_id is not string or call_id | length != 9 -%}
  {{- raise_exception('ids of tool calls have nine letters or digits') -}}
{%- endif -%}
"""
_CALL_LIST = """
{{- '[TOOL_CALLS][' -}}
{%- for call in message.tool_calls -%}
  {{- {'name': call.function.name, 'arguments': call.function.arguments@ID@} | tojson -}}
  {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ']' -}}
"""
_CALL_EACH = """
{%- for call in message.tool_calls -%}
  {{- '[TOOL_CALLS]' + call.function.name + @ID@'[ARGS]' + call.function.arguments | tojson -}}
{%- endfor -%}
"""
_CONTENT = "(message.content or '{}') | fromjson"
_RESULTS = {
    2: f"{{{{- [{{'name': message.name, 'content': {_CONTENT}}}] | tojson -}}}}",
    3: f"{{{{- {{'content': {_CONTENT}, 'call_id': message.tool_call_id}} | tojson -}}}}",
    7: "{{- message.tool_call_id + '[TOOL_CONTENT]' + message.content -}}",
    13: "{{- message.content -}}",
}


class Efforts(NamedTuple):
    """The levels of reasoning that a model has, and the one without which no prompt is written."""

    levels: list[str]
    default: str


def source(version: int, has_thinking: bool = False, efforts: Efforts | None = None) -> str:
    """Return the Jinja source for a version. `has_thinking`: the vocabulary has the tokens around a reasoning."""
    if version == 1:
        return _joined(_TURNS + _USER_1 + _ANSWER_1)
    text = _TURNS + (_USER_2 if version < 7 else _USER_7) + _ANSWER_2
    calls = _CALL_LIST if version < 11 else _CALL_EACH
    call_id = {2: "", 3: ", 'id': call.id", 7: ", 'id': call.id", 11: "'[CALL_ID]' + call.id + "}
    for mark, part in {
        "TOOLS": _TOOLS,
        "WHERE": "last" if version < 13 else "first",
        "SHOWN": "loop.index0 >= ns.last" if version == 2 else "true",
        "MIXED": "false" if version < 7 else "true",
        "EFFORT": "" if efforts is None else _EFFORT,
        "DEFAULT": "" if efforts is None else json.dumps(efforts.default),
        "LEVELS": "" if efforts is None else json.dumps(efforts.levels),
        "THINK": _THINK if has_thinking and version >= 13 else "",
        "CALLS": calls,
        "CHECK": _CHECK if 3 <= version < 13 else "",
        "ID": call_id.get(version, ""),
        "RESULT": _RESULTS[max(each for each in _RESULTS if each <= version)],
    }.items():
        text = text.replace(f"@{mark}@", part)
    return _joined(text)


def _joined(text: str) -> str:
    return re.sub(r"\n *", "", text)


def checked_version(name: object, path: Path) -> int:
    """Return the number of a version such as "v3". Raises `CheckpointError` for one without a template here."""
    number = int(name[1:]) if isinstance(name, str) and re.fullmatch(r"v\d{1,3}", name) else None
    if number not in VERSIONS:
        known = ", ".join(f"v{each}" for each in VERSIONS)
        raise CheckpointError(f"{path.name}: the version is {name!r:.80}; known are {known}")
    return number
