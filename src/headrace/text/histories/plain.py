"""Tools as plain text, for a model whose chat template has no place for them.

The tools stand in the system message, calls in the assistant's text, and results in the user's. The marks are the marks
of the format `hermes`, so that its reader and its grammar serve such a model too. Called by `histories`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.messages import PastCall

EXAMPLE = '<tool_call>\n{"name": "name of the function", "arguments": {"argument": "value"}}\n</tool_call>'
"""A call in the form that `call_text` writes."""


def tools_text(tools: Sequence[Mapping[str, Any]], example: str = EXAMPLE) -> str:
    """Return the text about the tools for the system message. `example`: a call in the form that the model must
    write."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call functions, here one a line, as JSON with the schema of the arguments:\n<tools>\n{lines}\n"
        f"</tools>\n\nTo call one, write its name and arguments in exactly this form:\n{example}\n\n"
        "Write one such block for each call, and nothing after the last. The results come in the next message. "
        "Call one only where it helps; else answer in plain text."
    )


def call_text(call: PastCall) -> str:
    """Return a call as the model writes it; its arguments are the JSON text of the request."""
    function = call.form["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}\n</tool_call>'


def result_text(text: str) -> str:
    """Return the result of a call as the user's text."""
    return f"<tool_response>\n{text}\n</tool_response>"
