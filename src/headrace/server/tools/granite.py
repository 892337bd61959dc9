"""`<|tool_call|>` and a JSON list of calls: Granite 3."""

from __future__ import annotations

from headrace.server.tools.form import Part, Wanted, const, sequence
from headrace.server.tools.form import json_call as call_form
from headrace.server.tools.parser import ToolParser
from headrace.server.tools.reader import Reading
from headrace.server.tools.written import json_calls

openers = ("<|tool_call|>",)
starts = ()


def read(call: ToolParser) -> Reading[None]:
    yield from call.text.expect("<|tool_call|>")
    yield from call.text.space()
    yield from json_calls(call)


def form(wanted: Wanted) -> Part:
    calls = [call_form(name, schema) for name, schema in wanted.schemas.items()]
    return sequence(wanted.text("<|tool_call|>"), const("["), wanted.several(calls, ", "), const("]"))
