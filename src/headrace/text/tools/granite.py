"""`<|tool_call|>` and a JSON list of calls: Granite 3."""

from __future__ import annotations

from headrace.text.tools.form import Part, Wanted, const, sequence
from headrace.text.tools.form import json_call as call_form
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import Reading
from headrace.text.tools.written import json_calls

openers = ("<|tool_call|>",)
starts = ()


def read(call: ToolParser) -> Reading[None]:
    yield from call.text.expect("<|tool_call|>")
    yield from call.text.space()
    yield from json_calls(call)


def form(wanted: Wanted) -> Part:
    calls = [call_form(name, schema) for name, schema in wanted.schemas.items()]
    return sequence(wanted.text("<|tool_call|>"), const("["), wanted.several(calls, ", "), const("]"))
