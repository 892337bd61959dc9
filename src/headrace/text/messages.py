"""The messages of a conversation, checked, in one form for all APIs.

`read_messages` reads OpenAI's form; the other APIs build `ChatMessage`s themselves. `templates` renders them, and
`histories` changes messages that a template does not take. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.text.pictures.marks import PictureInput, Pictures, has_marks, order, parts, replaced
from headrace.text.tools import custom, functions
from headrace.text.traits import Traits

_REASONING = ("reasoning_content", "thinking", "reasoning")
MAX_LABEL = 80
_PARTS = ("text", "input_text", "output_text", "refusal")
PICTURE_PARTS = ("image_url", "input_image")

Warn = Callable[[str, str], None]
"""Gets the field of a request, and the reason why it is not honoured."""


class PastCall(NamedTuple):
    """A call of an earlier turn. `form` is OpenAI's: id, type, and a function with name and arguments, the latter as
    an object or as JSON text. `field` names the arguments in the request, for errors."""

    form: dict[str, Any]
    field: str

    @classmethod
    def of(cls, call_id: str, name: str, arguments: Any, field: str) -> PastCall:
        """Return a call with these fields alone."""
        return cls({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}, field)

    def is_well_formed(self) -> bool:
        """Return whether the arguments are an object, the JSON text of one, or absent."""
        return self._object() is not None

    def template_form(self, text_arguments: bool) -> dict[str, Any]:
        """Return the call with its arguments as JSON text, as they came, or as an object: {} if they are no object.

        A model can write a call that is cut or malformed. A client that sends it back must not be refused for ever.
        """
        function = self.form["function"]
        arguments = function.get("arguments")
        if text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(self._object() or {}, ensure_ascii=False)
        elif not text_arguments:
            arguments = self._object() or {}
        return {**self.form, "function": {**function, "arguments": arguments}}

    def _object(self) -> dict[str, Any] | None:
        arguments = self.form["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                return None
        return {} if arguments is None else arguments if isinstance(arguments, dict) else None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation, checked. `content` is a text, or several that the template puts together; unset
    or None: there is none. `extra` are further fields that templates may read: name, tool_call_id, and whatever other
    fields a client sends."""

    role: str
    content: str | list[str] | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: Any = None
    tool_calls: list[PastCall] = []
    extra: dict[str, Any] = {}

    def template_form(self, traits: Traits) -> dict[str, Any]:
        """Return the message as a template with these traits reads it."""
        role = "system" if self.role == "developer" and not traits.shows_developer else self.role
        message: dict[str, Any] = {"role": role, "content": self._content(traits), **self.extra}
        if self.tool_calls:
            message["tool_calls"] = [call.template_form(traits.text_arguments) for call in self.tool_calls]
        if self.reasoning is not None:
            # Some templates read one of the two names, some the other.
            message = {"thinking": self.reasoning, **message, "reasoning_content": self.reasoning}
        return message

    def _content(self, traits: Traits) -> str | list[dict[str, Any]] | None:
        form = traits.content_form
        if self.role == "tool" and form == "both":  # written as a text, whatever else the template takes
            form = "string"
        if isinstance(self.content, list):
            return "\n".join(self.content) if form == "string" else [p for text in self.content for p in _parts(text)]
        if isinstance(self.content, str):
            has_parts = form == "parts" or (form == "both" and has_marks(self.content))
            return _parts(self.content) if has_parts else self.content
        if self.tool_calls and traits.takes_null:
            return None
        return [] if form == "parts" else ""


def plain(message: ChatMessage) -> str:
    """Return the text of a message; several are joined with newlines."""
    if isinstance(message.content, list):
        return "\n".join(message.content)
    return message.content if isinstance(message.content, str) else ""


BILLING = "x-anthropic-billing-header:"
"""Begins the first line of Claude Code's system message. It changes with each call and is not for the model."""


def without_billing(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation without that line; the same list if there is none."""
    first = messages[0] if messages else None
    if first is None or first.role not in ("system", "developer") or not plain(first).startswith(BILLING):
        return messages
    texts = [first.content] if isinstance(first.content, str) else list(first.content or ())
    texts[0] = texts[0].partition("\n")[2].lstrip("\n")
    texts = [text for place, text in enumerate(texts) if text or place]
    content = texts[0] if isinstance(first.content, str) and texts else texts
    return [*([msgspec.structs.replace(first, content=content)] if texts else []), *messages[1:]]


def check_role(role: object, field: str) -> str:
    """Return `role` if a template may get it. Raises `RequestError`."""
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise RequestError(field, role, "a string of 1 to 64 characters")
    return role


def placeholder(kind: str, name: str = "") -> str:
    """Return the text that replaces a part of an earlier message which the model cannot read."""
    label = f"{kind.replace('_', ' ')} {name[:MAX_LABEL]}".strip()
    return f"[{label}: left out, for the model reads text only]"


LEFT_OUT = "the model reads text only: a short text stands in its place"
"""The warning about such a part."""


def first_new(roles: Sequence[object]) -> int:
    """Return the place after the model's last turn: the user's messages from there on are new, and must be read. A
    final message of the model's does not count, for the answer continues it."""
    return next((place + 1 for place in range(len(roles) - 2, -1, -1) if roles[place] == "assistant"), 0)


def texts_of(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """Yield the texts of all messages, in their order."""
    for message in messages:
        if isinstance(message.content, str):
            yield message.content
        elif isinstance(message.content, list):
            yield from message.content


def pictures_of(messages: Sequence[ChatMessage], pictures: Pictures) -> list[PictureInput]:
    """Return the pictures that stand in the messages, in their order."""
    return [pictures[place] for place in order(texts_of(messages))]


def without_pictures(messages: Sequence[ChatMessage], pictures: Pictures, warn: Warn) -> list[ChatMessage]:
    """Return the messages for a model that reads none of `pictures`: short texts replace those of earlier messages and
    of results of tools, and `warn` gets the field and the reason. Raises the errors of the others."""

    def write(place: int) -> str:
        picture = pictures[place]
        if picture.refusal is not None:
            raise picture.refusal
        warn(picture.field, LEFT_OUT)
        return placeholder(picture.kind)

    return [_rewritten(message, lambda text: replaced(text, write)) for message in messages]


def _rewritten(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    content = message.content
    if isinstance(content, str):
        content = change(content)
    elif isinstance(content, list):
        content = [change(text) for text in content]
    return message if content == message.content else msgspec.structs.replace(message, content=content)


def read_messages(
    messages: Sequence[object], warn: Warn | None = None, pictures: Pictures | None = None
) -> list[ChatMessage]:
    """Return a request's `messages`, which are in OpenAI's form.

    `pictures` gets the pictures, for which marks stand in the texts. Other parts that the model cannot read, and
    pictures without `pictures`, are refused in the user's messages after the model's last turn. In earlier messages
    and in results of tools short texts replace them, and `warn` gets the field and the reason; without `warn` they are
    refused everywhere. Raises `RequestError`.
    """
    bounds.check("messages", messages)
    if any(map(_has_function, messages)):
        original, messages = messages, functions.as_tool_messages(messages)
        if warn is not None and any(one is not other for one, other in zip(original, messages, strict=True)):
            warn("messages", functions.READ_AS_TOOLS)
    new = first_new([message.get("role") if isinstance(message, Mapping) else None for message in messages])
    read: list[ChatMessage] = []
    for place, message in enumerate(messages):
        is_new = place >= new and isinstance(message, Mapping) and message.get("role") == "user"
        read.append(_read_message(message, f"messages[{place}]", None if is_new else warn, pictures))
    return read


def _has_function(message: object) -> bool:
    """Return whether a message has a call of a function in OpenAI's older form, or its result."""
    return isinstance(message, Mapping) and (message.get("role") == "function" or "function_call" in message)


def _read_message(message: object, field: str, warn: Warn | None, pictures: Pictures | None) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(field, message, "an object with role and content")
    role = check_role(message.get("role"), f"{field}.role")
    content = (
        None if message.get("content") is None else _content(message["content"], f"{field}.content", warn, pictures)
    )
    calls = _tool_calls(message["tool_calls"], f"{field}.tool_calls") if message.get("tool_calls") else []
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    extra = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    return ChatMessage(role=role, content=content, reasoning=reasoning, tool_calls=calls, extra=extra)


def _content(content: object, field: str, warn: Warn | None, pictures: Pictures | None) -> str | list[str]:
    if isinstance(content, str):
        bounds.check("text", content, field)
        return content
    if not isinstance(content, list):
        raise RequestError(field, content, "a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            part = _part(part)
        if not isinstance(part, Mapping):
            raise RequestError(f"{field}[{i}]", part, "an object with type and text")
        kind = part.get("type")
        if pictures is not None and kind in PICTURE_PARTS:
            texts.append(pictures.mark(picture_part(part, f"{field}[{i}]", warn is None)))
            continue
        if warn is not None and isinstance(kind, str) and kind not in _PARTS:
            warn(f"{field}[{i}]", LEFT_OUT)
            texts.append(placeholder(kind))
            continue
        if kind not in _PARTS:
            raise RequestError(f"{field}[{i}].type", part.get("type"), "text: nothing else is read")
        name = "refusal" if part["type"] == "refusal" else "text"
        text = part.get(name)
        if not isinstance(text, str):
            raise RequestError(f"{field}[{i}].{name}", text, "a string")
        bounds.check("text", text, f"{field}[{i}].{name}")
        texts.append(text)
    return texts


def picture_part(part: Mapping[str, Any], field: str, is_refused: bool) -> PictureInput:
    """Return the picture of a part in OpenAI's form. is_refused: where the model reads none, it is an error. Raises
    `RequestError`."""
    kind, source = str(part["type"]), part.get("image_url")
    if isinstance(source, Mapping):
        detail = source.get("detail")
        if detail not in (None, "auto", "low", "high", "original"):
            raise RequestError(f"{field}.image_url.detail", detail, "auto, low or high")
        source = source.get("url")
    if not isinstance(source, str):
        raise RequestError(
            f"{field}.image_url", source, "an object with the url of a picture: data:image/png;base64,..."
        )
    refusal = RequestError(f"{field}.type", kind, "text: nothing else is read") if is_refused else None
    return PictureInput(f"{field}.image_url", source, kind, refusal)


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(text: str) -> list[dict[str, Any]]:
    return list(parts(text)) if has_marks(text) else [_part(text)]


def _tool_calls(calls: object, field: str) -> list[PastCall]:
    if not isinstance(calls, list):
        raise RequestError(field, calls, "a list")
    return [_tool_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, field: str) -> PastCall:
    custom_call = call.get("custom") if isinstance(call, Mapping) and call.get("type") == "custom" else None
    if isinstance(custom_call, Mapping):
        call_id, name, text = call.get("id"), custom_call.get("name"), custom_call.get("input")
        if not isinstance(name, str) or not isinstance(text, str):
            raise RequestError(f"{field}.custom", custom_call, "an object with name and input, which are strings")
        return PastCall.of(call_id, name, custom.arguments(text), f"{field}.custom.input")
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(field, call, "an object with a function that has a name")
    return PastCall(call, f"{field}.function.arguments")
