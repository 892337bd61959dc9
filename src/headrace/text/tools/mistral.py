"""`[TOOL_CALLS]`: with a JSON list of calls (Mistral's tokenizers up to v7), or before each call's name, with
`[ARGS]` before its arguments (from v11 on; v11 itself has a `[CALL_ID]` between them).
"""

from __future__ import annotations

import re
import secrets
import string

from headrace.text.tools.form import Part, Wanted, const, json_of, sequence
from headrace.text.tools.form import json_call as call_form
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import Reading
from headrace.text.tools.written import json_calls

openers = ("[TOOL_CALLS]",)
starts = ()
other_marks = ("[ARGS]", "[CALL_ID]")

_NAME = re.compile(r"[^\s\[\]{}\"]+")
_LETTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """Nine letters or digits: the templates take no other id."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    yield from text.expect("[TOOL_CALLS]")
    yield from text.space()
    if (yield from text.peek()) == "[":
        yield from json_calls(call)
        return
    call.name((yield from text.word(_NAME)))
    if (yield from text.take("[CALL_ID]")):
        yield from text.word(_NAME)
    # Shown without its special tokens, the mark is missing.
    yield from text.take("[ARGS]")
    yield from text.space()
    yield from call.arguments()
    call.done()


def form(wanted: Wanted) -> Part:
    if "[ARGS]" in wanted.template:
        named = [(f"[TOOL_CALLS]{name}[ARGS]", schema) for name, schema in wanted.schemas.items()]
        return wanted.several([sequence(wanted.text(begin), json_of(schema)) for begin, schema in named], "")
    calls = [call_form(name, schema) for name, schema in wanted.schemas.items()]
    return sequence(wanted.text("[TOOL_CALLS]"), const("["), wanted.several(calls, ", "), const("]"))
