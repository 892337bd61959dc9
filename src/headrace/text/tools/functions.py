"""OpenAI's older form of calls, read as the form with tools: the fields `functions` and `function_call` of a request,
the `function_call` of an assistant's message, and results as messages of the role `function`.

Knows no formats and no HTTP. `text.messages` reads messages with it, `serve.call.call` the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.protocol.errors import RequestError
from headrace.text.tools.choice import ToolFields, ToolUse

READ_AS_TOOLS = "OpenAI's older form, read as tools and their results"
"""The warning about messages in that form."""
_FIELDS = ToolFields("name", "description", "strict", "parameters", "function_call.name")


def tool_use(functions: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> ToolUse:
    """Return `functions` as tools, of which an answer calls one at most. Raises `RequestError`."""
    tools = [{"type": "function", "function": function} for function in functions or []]
    places = [f"functions[{place}]" for place in range(len(tools))]
    match choice:
        case None | "none" | "auto":
            chosen: Any = choice
        case {"name": str(name)}:
            chosen = {"type": "function", "function": {"name": name}}
        case _:
            raise RequestError("function_call", choice, 'none, auto, or {"name": ...}')
    return ToolUse.of(tools, chosen, False, _FIELDS, places=places)._replace(is_legacy=True)


def as_tool_messages(messages: Sequence[object]) -> list[object]:
    """Return a request's messages with calls of functions and their results in the form of tools.

    A call's id comes from its place, so that a growing conversation keeps its ids. A result belongs to the call before
    it that has its name and no result yet. Raises `RequestError`.
    """
    read: list[object] = []
    waiting: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            read.append(message)
            continue
        rest = {key: value for key, value in message.items() if key != "function_call"}
        call, name = message.get("function_call"), message.get("name")
        if message.get("role") == "function":
            if not isinstance(name, str) or not name:
                raise RequestError(f"messages[{place}].name", name, "the name of the function")
            call_id = next((call_id for call_id, called in waiting if called == name), f"call_{place}")
            waiting = [one for one in waiting if one[0] != call_id]
            message = {**rest, "role": "tool", "tool_call_id": call_id}
        elif call is not None and message.get("role") == "assistant" and not message.get("tool_calls"):
            if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                raise RequestError(f"messages[{place}].function_call", call, "an object with a name and arguments")
            waiting.append((f"call_{place}", call["name"]))
            message = {**rest, "tool_calls": [{"id": f"call_{place}", "type": "function", "function": call}]}
        read.append(message)
    return read
