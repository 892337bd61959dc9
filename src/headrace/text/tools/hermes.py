"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others."""

from __future__ import annotations

from headrace.text.tools.form import Part, Wanted, sequence
from headrace.text.tools.form import json_call as call_form
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import Reading
from headrace.text.tools.written import json_call

openers = ("<tool_call>",)
starts = ()
other_marks = ("</tool_call>",)


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    yield from text.expect("<tool_call>")
    yield from text.space()
    yield from json_call(call)
    yield from text.space()
    # Some leave the end out where it ends the answer too.
    if (yield from text.peek()):
        yield from text.expect("</tool_call>")
    call.done()


def form(wanted: Wanted) -> Part:
    calls = [
        sequence(wanted.text("<tool_call>\n"), call_form(name, schema), wanted.text("\n</tool_call>"))
        for name, schema in wanted.schemas.items()
    ]
    return wanted.several(calls, "\n")
