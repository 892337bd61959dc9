"""Changes a conversation that a chat template does not take into one that it takes, with the same contents.

Each change concerns only the places that need it, and leaves the rest as it is. `needs` finds out, when a model is
loaded, which of them its template needs; `templates` applies them, and the caller learns what was changed. Knows no
template's name. The changes are applied in the order of `CHANGES`, for the later ones reckon with the earlier.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from headrace.text import plain_tools
from headrace.text.messages import ChatMessage, ToolCall, plain
from headrace.text.traits import Traits

_LETTERS = string.digits + string.ascii_letters
_ID_SIZE = 9


class Conversation(NamedTuple):
    """Messages and tools as a template gets them. `traits` are the template's; `example` is a call as it writes it.
    `continues`: the answer goes on with the last message."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None
    traits: Traits
    example: str = ""
    continues: bool = False


class Change(NamedTuple):
    """Something that was changed, for the caller: the request's field, and what was done."""

    field: str
    why: str


def changed(given: Conversation, names: Sequence[str]) -> tuple[Conversation, list[Change]]:
    """Return a conversation with the changes of these names, and those of them that changed something."""
    changes: list[Change] = []
    for name, (apply, field, why) in CHANGES.items():
        if name not in names:
            continue
        after = apply(given)
        if (after.messages, after.tools) != (given.messages, given.tools) and why:
            changes.append(Change(field, why))
        given = after
    return given, changes


def takes_late_system(traits: Traits) -> bool:
    """Whether the template writes system messages wherever they stand."""
    needs = traits.loses + traits.refuses
    return not {"one system", "one system of several", "no system"}.intersection(needs)


# Tools.


def _plain_tools(given: Conversation) -> Conversation:
    if not given.tools:
        return given
    text = plain_tools.tools_text(given.tools, given.example or plain_tools.EXAMPLE)
    messages = list(given.messages)
    if messages and _is_system(messages[0], given.traits):
        messages[0] = _joined(messages[0], ChatMessage(role="system", content=text))
    else:
        messages.insert(0, ChatMessage(role="system", content=text))
    return given._replace(messages=messages, tools=None)


def _whole_tools(given: Conversation) -> Conversation:
    return _with_functions(given, _whole_function)


def _whole_function(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {}
    filled = {"type": "object", "properties": {}} | {
        key: value for key, value in parameters.items() if value is not None
    }
    return {**function, "description": function.get("description") or "", "parameters": filled}


def _described_parameters(given: Conversation) -> Conversation:
    def apply(function: dict[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if not isinstance(parameters, dict) or not isinstance(properties, dict):
            return function
        described = {
            name: {"description": "", **each} if isinstance(each, dict) else each for name, each in properties.items()
        }
        return {**function, "parameters": {**parameters, "properties": described}}

    return _with_functions(given, apply)


def _plain_schemas(given: Conversation) -> Conversation:
    def apply(function: dict[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters")
        if not isinstance(parameters, dict):
            return function
        return {**function, "parameters": _plain_schema(parameters, parameters, 0)}

    return _with_functions(given, apply)


def _with_functions(given: Conversation, apply: Callable[[dict[str, Any]], dict[str, Any]]) -> Conversation:
    tools = [
        {**tool, "function": apply(tool["function"])} if isinstance(tool.get("function"), dict) else tool
        for tool in given.tools or []
    ]
    return given._replace(tools=tools or given.tools)


_MAX_DEPTH = 16
_CHOICES = ("anyOf", "oneOf", "allOf")
_TYPES: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


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


def _empty_tools(given: Conversation) -> Conversation:
    return given if given.tools else given._replace(tools=[])


# Calls and their results.


def _plain_calls(given: Conversation) -> Conversation:
    messages: list[ChatMessage] = []
    for message in given.messages:
        if message.tool_calls:
            texts = [plain(message), *(plain_tools.call_text(call) for call in message.tool_calls)]
            message = replace(message, content="\n".join(text for text in texts if text), tool_calls=[])
        messages.append(message)
    return _plain_results(given._replace(messages=messages))


def _plain_results(given: Conversation) -> Conversation:
    return _results_as_users(given, range(len(given.messages)))


def _plain_stray_results(given: Conversation) -> Conversation:
    answered = _answered(given.messages)
    return _results_as_users(given, [place for place in range(len(given.messages)) if place not in answered])


def _results_as_users(given: Conversation, places: Sequence[int]) -> Conversation:
    """Results at these places become the user's messages; neighbours become one."""
    messages: list[ChatMessage] = []
    last = -2
    for place, message in enumerate(given.messages):
        if message.role == "tool" and place in places:
            content = plain_tools.result_text(plain(message))
            if last == place - 1:
                content = f"{plain(messages.pop())}\n{content}"
            message, last = ChatMessage(role="user", content=content), place
        messages.append(message)
    return given._replace(messages=messages)


def _named_results(given: Conversation) -> Conversation:
    answered = _answered(given.messages)

    def apply(place: int, message: ChatMessage) -> ChatMessage:
        if message.role != "tool" or message.extra.get("name"):
            return message
        call = answered.get(place)
        name = call.form["function"]["name"] if call else "unknown"
        return replace(message, extra={**message.extra, "name": name})

    return _each(given, apply)


def _short_ids(given: Conversation) -> Conversation:
    answered = _answered(given.messages)
    nameless: dict[int, str] = {}

    def of_call(call: ToolCall) -> str:
        call_id = call.form.get("id")
        # A call without an id gets one of its place.
        return short_id(call_id if isinstance(call_id, str) and call_id else nameless.setdefault(id(call), call.field))

    def apply(place: int, message: ChatMessage) -> ChatMessage:
        calls = [call._replace(form={**call.form, "id": of_call(call)}) for call in message.tool_calls]
        extra = message.extra
        if message.role == "tool":
            call_id = extra.get("tool_call_id")
            call = answered.get(place)
            known = of_call(call) if call else short_id(call_id if isinstance(call_id, str) else f"{place}")
            extra = {**extra, "tool_call_id": known}
        return replace(message, tool_calls=calls, extra=extra)

    return _each(given, apply)


def short_id(call_id: str) -> str:
    """Return the id itself if it is nine letters or digits, else nine that it always gets."""
    if len(call_id) == _ID_SIZE and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest())
    letters = ""
    for _ in range(_ID_SIZE):
        number, digit = divmod(number, len(_LETTERS))
        letters += _LETTERS[digit]
    return letters


def _null_beside_calls(given: Conversation) -> Conversation:
    def apply(_: int, message: ChatMessage) -> ChatMessage:
        is_empty = bool(message.tool_calls) and not plain(message)
        return replace(message, content=UNSET) if is_empty else message

    return _each(given, apply)


def _text_before_calls(given: Conversation) -> Conversation:
    messages: list[ChatMessage] = []
    for message in given.messages:
        if message.tool_calls and plain(message):
            messages.append(replace(message, tool_calls=[]))
            message = ChatMessage(role=message.role, tool_calls=message.tool_calls)
        messages.append(message)
    return given._replace(messages=messages)


def _no_text_beside_calls(given: Conversation) -> Conversation:
    return _each(given, lambda _, message: replace(message, content=UNSET) if message.tool_calls else message)


def _text_in_reasoning(given: Conversation) -> Conversation:
    def apply(_: int, message: ChatMessage) -> ChatMessage:
        text, thought = plain(message), message.reasoning
        if not (message.tool_calls and text and isinstance(thought, str) and thought):
            return message
        extra = {key: value for key, value in message.extra.items() if key not in ("reasoning", "thinking")}
        extra.pop("reasoning_content", None)
        return replace(message, content=UNSET, reasoning=f"{thought}\n\n{text}", extra=extra)

    return _each(given, apply)


def _one_call_a_turn(given: Conversation) -> Conversation:
    messages: list[ChatMessage] = []
    rest = list(enumerate(given.messages))
    answered = _answered(given.messages)
    while rest:
        _, message = rest.pop(0)
        if len(message.tool_calls) < 2:
            messages.append(message)
            continue
        results: list[tuple[int, ChatMessage]] = []
        while rest and rest[0][1].role == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(message.tool_calls):
            first = message if number == 0 else ChatMessage(role=message.role)
            messages.append(replace(first, tool_calls=[call]))
            messages += [result for place, result in results if answered.get(place) is call]
        known = {id(call) for call in message.tool_calls}
        messages += [result for place, result in results if id(answered.get(place)) not in known]
    return given._replace(messages=messages)


def _answered(messages: Sequence[ChatMessage]) -> dict[int, ToolCall]:
    """Return the call that each result answers, by the result's place: the last one of its id that waits, or where it
    has no id, the first that waits. A result of no call is left out."""
    waiting: list[ToolCall] = []
    answered: dict[int, ToolCall] = {}
    for place, message in enumerate(messages):
        waiting += message.tool_calls
        if message.role != "tool":
            continue
        call_id = message.extra.get("tool_call_id")
        fitting = [call for call in reversed(waiting) if call.form.get("id") == call_id] if call_id else waiting
        if fitting:
            answered[place] = fitting[0]
            waiting = [call for call in waiting if call is not fitting[0]]
    return answered


# System messages.


def _is_system(message: ChatMessage, traits: Traits) -> bool:
    return message.role == "system" or (message.role == "developer" and not traits.shows_developer)


def _one_system(given: Conversation) -> Conversation:
    """The first message alone may be a system message. Neighbours of one role are put together: most templates that
    take no later one want the roles to alternate."""
    merged: list[ChatMessage] = []
    is_moved = False
    for message in given.messages:
        is_system = _is_system(message, given.traits)
        joins = bool(merged) and (is_system or (is_moved and message.role == "user"))
        if joins and (merged[-1].role == "user" or (is_system and _is_system(merged[-1], given.traits))):
            merged[-1] = _joined(merged[-1], message)
        elif is_system and merged:
            merged.append(ChatMessage(role="user", content=message.content))
        else:
            merged.append(message)
        is_moved = is_system and merged[-1].role == "user"
    return given._replace(messages=merged)


def _one_of_several(given: Conversation) -> Conversation:
    num_systems = sum(_is_system(message, given.traits) for message in given.messages)
    return _one_system(given) if num_systems > 1 else given


def _no_first_system(given: Conversation) -> Conversation:
    num = next((i for i, message in enumerate(given.messages) if not _is_system(message, given.traits)), None)
    moved = _no_system(given._replace(messages=given.messages[: None if num is None else num + 1]))
    return given._replace(messages=moved.messages + given.messages[len(given.messages) if num is None else num + 1 :])


def _no_system(given: Conversation) -> Conversation:
    messages: list[ChatMessage] = []
    for message in given.messages:
        is_moved = bool(messages) and messages[-1].role == "system" and message.role == "user"
        if _is_system(message, given.traits):
            message = ChatMessage(role="system", content=message.content)
        if is_moved or (messages and messages[-1].role == message.role == "system"):
            message = replace(_joined(messages.pop(), message), role=message.role)
        messages.append(message)
    return given._replace(
        messages=[replace(message, role="user") if message.role == "system" else message for message in messages]
    )


# The order of turns.


def _user_first(given: Conversation) -> Conversation:
    messages = list(given.messages)
    place = 0
    while place < len(messages) and messages[place].role in ("system", "developer"):
        place += 1
    if place == len(messages) or messages[place].role != "user":
        messages.insert(place, ChatMessage(role="user", content=""))
    return given._replace(messages=messages)


def _user_before_calls(given: Conversation) -> Conversation:
    first = next((message for message in given.messages if not _is_system(message, given.traits)), None)
    return _user_first(given) if first is not None and first.tool_calls else given


def _no_empty_answers(given: Conversation) -> Conversation:
    last = given.messages[-1] if given.continues else None
    return given._replace(
        messages=[
            message
            for message in given.messages
            if message is last or message.role != "assistant" or message.tool_calls or plain(message)
        ]
    )


def _joined_turns(given: Conversation) -> Conversation:
    messages: list[ChatMessage] = []
    for message in given.messages:
        last = messages[-1] if messages else None
        if (
            last is None
            or last.role != message.role
            or message.role not in ("user", "assistant")
            or last.tool_calls
            or message.tool_calls
        ):
            messages.append(message)
        else:
            messages[-1] = _joined(last, message)
    return given._replace(messages=messages)


def _answered_results(given: Conversation) -> Conversation:
    messages: list[ChatMessage] = []
    for message in given.messages:
        if message.role == "user" and messages and (messages[-1].role == "tool" or messages[-1].tool_calls):
            messages.append(ChatMessage(role="assistant", content=""))
        messages.append(message)
    return given._replace(messages=messages)


def _one_text(given: Conversation) -> Conversation:
    return _each(
        given,
        lambda _, message: replace(message, content=plain(message)) if isinstance(message.content, list) else message,
    )


def _one_system_text(given: Conversation) -> Conversation:
    systems = [message for message in given.messages if _is_system(message, given.traits)]
    return _each(given, lambda _, message: replace(message, content=plain(message)) if message in systems else message)


def _joined(message: ChatMessage, other: ChatMessage) -> ChatMessage:
    """Return the first message with the text, and the reasoning, of the other added to it."""
    texts = [text for text in (plain(message), plain(other)) if text]
    thoughts = [thought for thought in (message.reasoning, other.reasoning) if isinstance(thought, str) and thought]
    return replace(message, content="\n\n".join(texts), reasoning="\n\n".join(thoughts) or None)


def _each(given: Conversation, apply: Callable[[int, ChatMessage], ChatMessage]) -> Conversation:
    return given._replace(messages=[apply(place, message) for place, message in enumerate(given.messages)])


_Apply = Callable[[Conversation], Conversation]

CHANGES: Mapping[str, tuple[_Apply, str, str]] = {
    "plain tools": (
        _plain_tools,
        "tools",
        "the chat template has no place for tools: the system message has them as text",
    ),
    "whole tools": (
        _whole_tools,
        "tools",
        "the chat template wants a description and parameters: empty ones are given",
    ),
    "plain schemas": (
        _plain_schemas,
        "tools",
        "the chat template takes simple schemas only, and gets each part with one type",
    ),
    "described parameters": (
        _described_parameters,
        "tools",
        "the chat template wants a description of each parameter: empty ones are given",
    ),
    "empty tools": (_empty_tools, "", ""),
    "one text": (_one_text, "messages", "the chat template takes no lists of texts here: they are one text"),
    "one system text": (_one_system_text, "", ""),
    "plain calls": (
        _plain_calls,
        "messages",
        "the chat template has no place for calls: they and their results are texts",
    ),
    "plain results": (
        _plain_results,
        "messages",
        "the chat template has no place for results of calls: they are the user's",
    ),
    "plain results without calls": (
        _plain_stray_results,
        "messages",
        "the chat template takes no results without calls: they are the user's",
    ),
    "named results": (
        _named_results,
        "messages",
        "the chat template wants the tool's name beside a result: it is the call's",
    ),
    "short ids": (_short_ids, "messages", "the chat template takes ids of nine letters or digits: others are replaced"),
    "null beside calls": (_null_beside_calls, "", ""),
    "text before calls": (
        _text_before_calls,
        "messages",
        "the chat template takes no text beside calls: it is a turn before",
    ),
    "text in the reasoning": (
        _text_in_reasoning,
        "messages",
        "the chat template takes no text beside reasoning and calls: it is added to the reasoning",
    ),
    "no text beside calls": (
        _no_text_beside_calls,
        "messages",
        "the chat template takes no text beside calls: it is left out",
    ),
    "one call a turn": (
        _one_call_a_turn,
        "messages",
        "the chat template takes one call a turn: each is a turn, with its result",
    ),
    "one system": (
        _one_system,
        "messages",
        "the chat template takes one system message, and first: later ones are the user's",
    ),
    "one system of several": (
        _one_of_several,
        "messages",
        "the chat template takes one system message, and first: later ones are the user's",
    ),
    "no first system": (
        _no_first_system,
        "messages",
        "the chat template leaves a first system message out: it is the user's",
    ),
    "no system": (_no_system, "messages", "the chat template takes no system message: it is the user's"),
    "no empty answers": (_no_empty_answers, "messages", "the chat template takes no empty answers: they are left out"),
    "user first": (_user_first, "messages", "the chat template wants the user first: an empty message is put there"),
    "user before calls": (
        _user_before_calls,
        "messages",
        "the chat template wants the user before calls: an empty message is put there",
    ),
    "joined turns": (
        _joined_turns,
        "messages",
        "the chat template wants turns to alternate: neighbours of one role are joined",
    ),
    "answered results": (
        _answered_results,
        "messages",
        "the chat template wants an answer between results and the user: an empty one is put there",
    ),
}
"""By name: what makes the change, the field that it concerns, and what the caller is told; nothing where the content is
the same."""
SMALL = tuple(name for name in CHANGES if name not in ("plain tools", "plain calls", "plain results", "no system"))
"""Changes to try together on what a template refuses in spite of the changes that it was found to need."""
PLAIN = (
    "plain tools",
    "empty tools",
    "one text",
    "plain calls",
    "no system",
    "no empty answers",
    "user first",
    "joined turns",
)
"""The last resort: turns of the user's and the assistant's, with nothing but text."""
