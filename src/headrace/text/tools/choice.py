"""Checks a chat's `tools`, `tool_choice` and `parallel_tool_calls`. Errors name the field.

Knows no formats and no HTTP; called by the routes of the APIs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.text.tools import custom

# A name must not contain characters that are marks of some format.
_NAME = re.compile(r"[\w.:/-]{1,256}")

Mode = Literal["none", "auto", "required"]


class ToolFields(NamedTuple):
    """An API's names for the fields of a tool, and for the name in `tool_choice`, for errors. The defaults are OpenAI's
    in chat completions."""

    name: str = "function.name"
    description: str = "function.description"
    strict: str = "function.strict"
    parameters: str = "function.parameters"
    chosen: str = "tool_choice.function.name"

    @property
    def is_nested(self) -> bool:
        """Return whether the other fields are in an object under the tool's type."""
        return "." in self.name


class ToolUse(NamedTuple):
    """`tools` in the form for the template, and the schemas of their parameters by name. With `mode` "required" the
    answer is one call or more of the tools in `schemas`; without `parallel` it has one call at most. `names` are the
    names of the schemas in the request, by tool: `tools[2].function.parameters`. `customs` are the tools that take a
    text, with the grammar of the text in Lark's syntax, None for any text; the template shows them as functions (see
    `custom`). `is_legacy`: the request has them as `functions` (see `functions`), and gets its call in that form."""

    tools: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    mode: Mode
    parallel: bool
    names: Mapping[str, str] = MappingProxyType({})
    customs: Mapping[str, str | None] = MappingProxyType({})
    is_legacy: bool = False

    @classmethod
    def of(
        cls,
        tools: list[dict[str, Any]] | None,
        choice: str | dict[str, Any] | None,
        parallel: bool,
        fields: ToolFields = ToolFields(),
        allowed: Container[object] | None = None,
        places: Sequence[str] | None = None,
    ) -> ToolUse:
        """Check tools in OpenAI's form and return them. `allowed`: names of tools; the others are left out. `places`:
        the request's name for each tool; None: `tools[0]` and so on. Raises `RequestError`, which has the names of
        `fields`."""
        bounds.check("tools", tools or [])
        places = places or [f"tools[{place}]" for place in range(len(tools or []))]
        read: list[dict[str, Any]] = []
        schemas: dict[str, dict[str, Any]] = {}
        names: dict[str, str] = {}
        customs: dict[str, str | None] = {}
        for at, tool in zip(places, tools or [], strict=True):
            named = fields
            if tool.get("type") == "custom":
                tool, grammar = custom.function(tool, at, fields.is_nested)
                named = _of_custom(fields)
                customs[tool["function"]["name"]] = grammar
            tool = _tool(tool, at, named)
            name = tool["function"]["name"]
            if name in schemas:
                raise RequestError(f"{at}.{named.name}", name, "a name that no other tool has")
            read.append(tool)
            schemas[name] = tool["function"]["parameters"]
            names[name] = f"{at}.{named.parameters}"
        if allowed is not None:
            read = [tool for tool in read if tool["function"]["name"] in allowed]
            schemas = {name: schema for name, schema in schemas.items() if name in allowed}
        mode, chosen = _choice(choice, schemas, fields)
        if mode == "required" and not schemas:
            raise RequestError("tools", [], "given, for tool_choice asks for a call")
        if chosen is not None and mode == "required":
            schemas = {name: schemas[name] for name in chosen}
        if mode == "none":
            return cls([], {}, mode, parallel)
        if isinstance(choice, dict) and "allowed_tools" in choice:
            read = [tool for tool in read if chosen is None or tool["function"]["name"] in chosen]
        single = isinstance(choice, dict) and choice.get("type") in ("function", "custom")
        return cls(read, schemas, mode, parallel and not single, names, customs)


NO_TOOLS = ToolUse([], {}, "none", True)
"""The use of a chat without tools and without a choice of them."""


def _of_custom(fields: ToolFields) -> ToolFields:
    """Return an API's names for the fields of a custom tool, which has a format instead of parameters."""
    spelled = [name.replace("function.", "custom.") for name in fields]
    return ToolFields(*spelled)._replace(parameters=spelled[3].replace("parameters", "format"))


def _tool(tool: dict[str, Any], field: str, fields: ToolFields) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"{field}.type", tool.get("type"), "function or custom: there are no other tools here")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{field}.function", function, "an object with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{field}.{fields.name}", name, "1 to 256 letters, digits or any of _ . : / -")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{field}.{fields.description}", function["description"], "a string")
    if not isinstance(function.get("strict", False), bool | None):
        raise RequestError(f"{field}.{fields.strict}", function["strict"], "true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestError(f"{field}.{fields.parameters}", parameters, "a JSON schema: an object")
    if parameters.get("type", "object") != "object":
        raise RequestError(f"{field}.{fields.parameters}.type", parameters["type"], "object: arguments have names")
    if not isinstance(parameters.get("properties", {}), dict):
        raise RequestError(f"{field}.{fields.parameters}.properties", parameters["properties"], "an object")
    return {**tool, "function": {**function, "parameters": parameters}}


def _choice(
    choice: str | dict[str, Any] | None, schemas: dict[str, dict[str, Any]], fields: ToolFields
) -> tuple[Mode, list[str] | None]:
    """Return the mode, and the names of the tools to choose from; None: all."""
    match choice:
        case None:
            return "auto" if schemas else "none", None
        case "none" | "auto" | "required":
            return choice if schemas or choice == "required" else "none", None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return "required", [_known(name, schemas, fields.chosen)]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            names = []
            for place, tool in enumerate(tools):
                function = tool.get(str(tool.get("type"))) if isinstance(tool, dict) else None
                tool_name = function.get("name") if isinstance(function, dict) else None
                names.append(_known(tool_name, schemas, f"tool_choice.allowed_tools.tools[{place}].function.name"))
            if not names:
                raise RequestError("tool_choice.allowed_tools.tools", tools, "at least one tool")
            return mode, names
    allowed = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
    raise RequestError("tool_choice", choice, allowed)


def _known(name: object, schemas: dict[str, dict[str, Any]], field: str) -> str:
    if not isinstance(name, str) or name not in schemas:
        raise RequestError(field, name, "the name of one of tools")
    return name
