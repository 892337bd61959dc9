"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`: GLM 4.5 and later, Laguna. Texts
stand bare, as in `qwen3_coder`."""

from __future__ import annotations

import re

from headrace.text.tools.form import Part, Wanted, const, json_of, optional, properties, sequence
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import IllFormed, Reading
from headrace.text.tools.tagged import free_text, is_text, value
from headrace.text.tools.written import json_text

openers = ("<tool_call>",)
starts = ()
other_marks = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_NAME = re.compile(r"[^\s<>{}\"]+")


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    yield from text.expect("<tool_call>")
    yield from text.space()
    name = yield from text.word(_NAME)
    call.name(name)
    keys: set[str] = set()
    yield from text.space()
    while not (yield from text.take("</tool_call>")):
        yield from text.expect("<arg_key>")
        key = (yield from text.until("</arg_key>")).strip()
        if key in keys:
            raise IllFormed
        yield from text.space()
        yield from text.expect("<arg_value>")
        call.write(f"{', ' if keys else '{'}{json_text(key)}: ")
        keys.add(key)
        yield from value(call, name, key, "</arg_value>", "")
        yield from text.space()
    if keys:
        call.write("}")
    call.done()


def form(wanted: Wanted) -> Part:
    calls = []
    for name, schema in wanted.schemas.items():
        parts = [wanted.text(f"<tool_call>{name}\n")]
        for key, one, required in properties(schema):
            begin = wanted.text(f"<arg_key>{key}</arg_key>\n<arg_value>")
            inner = (
                free_text(one, name, key, "</arg_value>", wanted.text("</arg_value>"))
                if is_text(wanted.schemas, name, key)
                else sequence(json_of(one), wanted.text("</arg_value>"))
            )
            part = sequence(begin, inner, const("\n"))
            parts.append(part if required else optional(part))
        calls.append(sequence(*parts, wanted.text("</tool_call>")))
    return wanted.several(calls, "\n")
