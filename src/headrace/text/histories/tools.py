"""Changes of the tools that a template writes. Called by `changes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.text.histories import plain
from headrace.text.histories.conversation import Conversation, is_system, joined
from headrace.text.messages import ChatMessage

_MAX_DEPTH = 16
_CHOICES = ("anyOf", "oneOf", "allOf")
_TYPES: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def plain_tools(conversation: Conversation) -> Conversation:
    """Make the tools a part of the first system message."""
    if not conversation.tools:
        return conversation
    text = plain.tools_text(conversation.tools, conversation.example or plain.EXAMPLE)
    messages = list(conversation.messages)
    if messages and is_system(messages[0], conversation.traits):
        messages[0] = joined(messages[0], ChatMessage(role="system", content=text))
    else:
        messages.insert(0, ChatMessage(role="system", content=text))
    return conversation._replace(messages=messages, tools=None)


def whole_tools(conversation: Conversation) -> Conversation:
    """Add a description and an object of parameters to each function that lacks them."""
    return _with_functions(conversation, _whole_function)


def _whole_function(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {}
    filled = {"type": "object", "properties": {}} | {
        key: value for key, value in parameters.items() if value is not None
    }
    return {**function, "description": function.get("description") or "", "parameters": filled}


def described_parameters(conversation: Conversation) -> Conversation:
    """Add a description to each parameter that lacks one."""

    def apply(function: dict[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if not isinstance(parameters, dict) or not isinstance(properties, dict):
            return function
        described = {
            name: {"description": "", **each} if isinstance(each, dict) else each for name, each in properties.items()
        }
        return {**function, "parameters": {**parameters, "properties": described}}

    return _with_functions(conversation, apply)


def plain_schemas(conversation: Conversation) -> Conversation:
    """Reduce each part of a schema to one type."""

    def apply(function: dict[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters")
        if not isinstance(parameters, dict):
            return function
        return {**function, "parameters": _plain_schema(parameters, parameters, 0)}

    return _with_functions(conversation, apply)


def _with_functions(conversation: Conversation, apply: Callable[[dict[str, Any]], dict[str, Any]]) -> Conversation:
    tools = [
        {**tool, "function": apply(tool["function"])} if isinstance(tool.get("function"), dict) else tool
        for tool in conversation.tools or []
    ]
    return conversation._replace(tools=tools or conversation.tools)


def _plain_schema(schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return a schema of which each part has one type and no alternatives; of several, the first that is not null."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {"type": "object"}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        schema = {**(target if isinstance(target, dict) else {}), **schema}
        schema.pop("$ref")
    for key in _CHOICES:
        options = [option for option in schema.get(key) or () if isinstance(option, dict)]
        options = [option for option in options if option.get("type") != "null"]
        if options:
            rest = {name: value for name, value in schema.items() if name not in _CHOICES}
            return _plain_schema({**options[0], **rest}, root, depth + 1)
    plain_one = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", *_CHOICES)}
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind is None:
        values = [schema["const"]] if "const" in schema else [v for v in schema.get("enum") or () if v is not None]
        kind = _TYPES.get(type(values[0]), "object") if values else "object" if "properties" in schema else "string"
    plain_one["type"] = kind
    if kind == "object" and isinstance(schema.get("properties"), dict):
        inner = schema["properties"].items()
        plain_one["properties"] = {name: _plain_schema(each, root, depth + 1) for name, each in inner}
    if kind == "array":
        plain_one["items"] = _plain_schema(schema.get("items") or {"type": "string"}, root, depth + 1)
    return plain_one


def empty_tools(conversation: Conversation) -> Conversation:
    """Put an empty list in place of absent tools."""
    return conversation if conversation.tools else conversation._replace(tools=[])
