"""`<|tool_call|>` and a JSON list of calls: Granite 3."""

from __future__ import annotations

from headrace.server.tools.parser import ToolParser
from headrace.server.tools.reader import Reading
from headrace.server.tools.written import json_calls

openers = ("<|tool_call|>",)
starts = ()


def read(call: ToolParser) -> Reading[None]:
    yield from call.text.expect("<|tool_call|>")
    yield from call.text.space()
    yield from json_calls(call)
