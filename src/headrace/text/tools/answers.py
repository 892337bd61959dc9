"""Makes the parsers of answers from the tables of formats and styles, the readers and `ToolParser`.

Knows no grammars; called by `detection` and by `serve.call.dialect`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from headrace.text.reasoning import Headers, begins_inside
from headrace.text.tools.calls import read_calls
from headrace.text.tools.formats import ToolFormat
from headrace.text.tools.headers import begun, read_header
from headrace.text.tools.parser import AnswerForm, Bounds, ToolParser
from headrace.text.tools.reader import Reading


def new_parser(
    form: AnswerForm, bounds: Bounds = Bounds(), new_id: Callable[[], str] | None = None, prompt: str = ""
) -> ToolParser:
    """Return a parser of one answer to `prompt`. `new_id` replaces the format's own ids."""
    tools, headers = form.tools, form.headers
    read = functools.partial(read_calls, tools)
    if headers is not None:
        read = functools.partial(_read_message, headers, tools)
    parser = ToolParser(read, form, new_id or tools.new_id, bounds, begins_inside(form.style, prompt))
    header = begun(headers, prompt) if headers is not None else ""
    if header or begins_in_prompt(tools, prompt):
        parser.begin(header or tools.in_prompt)
    return parser


def begins_in_prompt(tool_format: ToolFormat, prompt: str) -> bool:
    """Return whether the prompt ends with the mark of the answer's first part."""
    return bool(tool_format.in_prompt) and prompt.endswith(tool_format.in_prompt)


def _read_message(headers: Headers, tool_format: ToolFormat, call: ToolParser) -> Reading[None]:
    """Read the header of a message, or one call or list of calls in it."""
    for mark in headers.marks:
        if (yield from call.text.comes(mark)):
            yield from read_header(headers, call)
            return
    yield from read_calls(tool_format, call)
