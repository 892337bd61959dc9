"""Tools of a Responses request: the functions that the model gets for them, and the client's tool for each call.

The model knows functions. A `namespace` becomes its functions, with the namespace's name before theirs; a `custom` tool
becomes a function with one text (see `text.tools.custom`). Tools that a provider would run itself are left out with a
warning. `ClientTools.called` finds the client's own name for a call. Called by `responses_input` and
`responses_events`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.protocol.errors import RequestError
from headrace.serve.call.parsing import Warnings
from headrace.text.tools.choice import ToolFields, ToolUse

FIELDS = ToolFields("name", "description", "strict", "parameters", "tool_choice.name")
OWN = ("function", "custom")
CLIENTS = ("local_shell", "shell", "apply_patch")
"""Tools that the client runs, in forms that the models served here do not know."""
HOSTED = (
    "web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "image_generation", "mcp", "computer", "computer_use", "computer_use_preview", "tool_search",
    "programmatic_tool_calling", *CLIENTS,
)  # fmt: skip
HOSTED_ITEMS = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "tool_search_call", "tool_search_output", "additional_tools", "program", "program_output",
    *(f"{tool}_call" for tool in CLIENTS), *(f"{tool}_call_output" for tool in CLIENTS),
)  # fmt: skip
"""Input items that calls of these tools leave in a conversation, with their results."""


class CalledTool(NamedTuple):
    """The client's name for a tool. `namespace` None: it is in none. `is_custom`: it takes a text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ClientTools(NamedTuple):
    """The tools that the model may call, and the client's name for each by the name that the model has."""

    use: ToolUse
    by_name: Mapping[str, CalledTool] = MappingProxyType({})

    def called(self, name: str) -> CalledTool:
        """Return the client's tool for a name that the model wrote; the name of an unknown tool stays as it is."""
        return self.by_name.get(name) or CalledTool(name)


NO_TOOLS = ClientTools(ToolUse.of(None, None, True))


def flat_name(namespace: object, name: str) -> str:
    """Return the name under which the model has a tool of a namespace (None: of no namespace)."""
    return f"{namespace.rstrip('_')}__{name}" if isinstance(namespace, str) and namespace else name


def client_tools(
    tools: Sequence[Any], choice: str | Mapping[str, Any] | None, parallel: bool, warnings: Warnings
) -> ClientTools:
    """Return the tools of a request; tools that are left out are added to `warnings`. Raises `RequestError`."""
    by_name: dict[str, CalledTool] = {}
    flat: list[dict[str, Any]] = []
    places: list[str] = []

    def add(tool: Any, at: str, namespace: str | None = None, about: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in OWN:
            raise RequestError(f"{at}.type", kind, " or ".join(OWN))
        if not isinstance(tool.get("name"), str):
            raise RequestError(f"{at}.name", tool.get("name"), "a string")
        fields = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        if about and isinstance(fields.get("description", ""), str):
            fields["description"] = f"{about}\n\n{fields.get('description', '')}".strip()
        fields["name"] = flat_name(namespace, tool["name"])
        by_name[fields["name"]] = CalledTool(tool["name"], namespace, kind == "custom")
        places.append(at)
        if kind == "custom":
            flat.append({"type": kind, **fields, "format": tool.get("format")})
            return
        fields |= {name: tool[name] for name in ("parameters", "strict") if tool.get(name) is not None}
        flat.append({"type": kind, "function": fields})

    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in HOSTED:
            why = "it is no function" if kind in CLIENTS else "headrace runs no tools of its own"
            warnings.add(at, f"{kind} is left out: {why}")
        elif kind == "namespace":
            name, inner, about = tool.get("name"), tool.get("tools"), tool.get("description") or ""
            if not isinstance(name, str) or not name:
                raise RequestError(f"{at}.name", name, "a string that is not empty")
            if not isinstance(inner, list):
                raise RequestError(f"{at}.tools", inner, "a list of tools of the types function and custom")
            if not isinstance(about, str):
                raise RequestError(f"{at}.description", about, "a string")
            for place, each in enumerate(inner):
                # Templates have no place for the description of a namespace: its first function has it.
                add(each, f"{at}.tools[{place}]", name, "" if place else about)
        elif kind in OWN:
            add(tool, at)
        else:
            raise RequestError(f"{at}.type", kind, "function, custom, namespace, or a tool that a provider runs")
    return ClientTools(_use(flat, places, set(by_name), choice, parallel), by_name)


def _use(
    tools: list[dict[str, Any]],
    places: list[str],
    names: Set[object],
    choice: str | Mapping[str, Any] | None,
    parallel: bool,
) -> ToolUse:
    """Return the tools, which have these names, with the request's `tool_choice`. Raises `RequestError`."""
    choice = choice or "auto"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        names &= {_chosen(tool) for tool in allowed if isinstance(tool, dict)} if isinstance(allowed, list) else set()
        choice = choice.get("mode", "auto")
    if isinstance(choice, Mapping):
        name = _chosen(choice)
        if choice.get("type") not in OWN or name is None:
            bound = "auto, none, required, or a function or custom tool by its name"
            raise RequestError("tool_choice", dict(choice), bound)
        choice = {"type": "function", "function": {"name": name}}
    if not names and choice not in ("auto", "none"):
        raise RequestError("tool_choice", choice, "auto, none or left out where there are no tools")
    if not names:
        return ToolUse.of(None, None, True)
    return ToolUse.of(tools, choice, parallel, FIELDS, names, places)


def _chosen(tool: Mapping[str, Any]) -> str | None:
    """Return the model's name for a tool that `tool_choice` names; None if it names none."""
    name = tool.get("name")
    return flat_name(tool.get("namespace"), name) if isinstance(name, str) else None
