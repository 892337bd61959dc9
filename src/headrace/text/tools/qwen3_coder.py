"""`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`: Qwen 3 Coder, Qwen 3.5 and
later, Nemotron 3. Texts stand bare and are told as JSON strings; what its schema does not call a string stands as JSON.
"""

from __future__ import annotations

from headrace.text.tools.form import Part, Wanted, const, json_of, optional, properties, sequence
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import IllFormed, Reading
from headrace.text.tools.tagged import free_text, is_text, value
from headrace.text.tools.written import json_text

openers = ("<tool_call>", "<function=")
starts = ()
other_marks = ("</tool_call>",)


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    wrapped = yield from text.take("<tool_call>")
    yield from text.space()
    yield from text.expect("<function=")
    name = (yield from text.until(">")).strip()
    call.name(name)
    keys: set[str] = set()
    yield from text.space()
    while not (yield from text.take("</function>")):
        yield from text.expect("<parameter=")
        key = (yield from text.until(">")).strip()
        if key in keys:
            raise IllFormed
        yield from text.take("\n")
        call.write(f"{', ' if keys else '{'}{json_text(key)}: ")
        keys.add(key)
        yield from value(call, name, key, "</parameter>", "\n")
        yield from text.space()
    if keys:
        call.write("}")
    if wrapped:
        yield from text.space()
        if (yield from text.peek()):
            yield from text.expect("</tool_call>")
    call.done()


def form(wanted: Wanted) -> Part:
    calls = []
    for name, schema in wanted.schemas.items():
        parts = [wanted.text(f"<tool_call>\n<function={name}>\n")]
        for key, one, required in properties(schema):
            inner = (
                free_text(one, name, key, "</parameter>", const("</parameter>"))
                if is_text(wanted.schemas, name, key)
                else sequence(json_of(one), const("\n</parameter>"))
            )
            part = sequence(const(f"<parameter={key}>\n"), inner, const("\n"))
            parts.append(part if required else optional(part))
        calls.append(sequence(*parts, wanted.text("</function>\n</tool_call>")))
    return wanted.several(calls, "\n")
