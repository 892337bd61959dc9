"""`{"name": ..., "parameters": {...}}` as the answer, or after `<|python_tag|>`: Llama 3.1 to 3.3. Several are parted
by semicolons. Built-in tools are written `<|python_tag|>name.call(key="value")`.
"""

from __future__ import annotations

from headrace.text.tools.form import Part, Wanted
from headrace.text.tools.form import json_call as call_form
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.pythonic import keyword_call
from headrace.text.tools.reader import IllFormed, Reading
from headrace.text.tools.written import json_call

openers = ("<|python_tag|>",)
starts = ("{",)


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    tagged = yield from text.take("<|python_tag|>")
    yield from text.space()
    if tagged and (yield from text.peek()) != "{":
        name = yield from keyword_call(call, ".call")
        if not name:
            raise IllFormed
        call.done()
        return
    while True:
        yield from json_call(call)
        call.done()
        yield from text.space()
        if not (yield from text.take(";")):
            call.back()
            return
        yield from text.space()


def form(wanted: Wanted) -> Part:
    return wanted.several([call_form(name, schema, "parameters") for name, schema in wanted.schemas.items()], "; ")
