"""Renders a conversation into the prompt of a model: checks the messages, then runs the model's chat template.

The program `sandbox` renders templates in a process of bounded time, memory and output. Templates come from the model
or the server's flags, never from a request. Every API gives its messages as `ChatMessage`s. Knows no tokens and no
engine; called by `serve.call.service` and by the offline `chat`.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
from headrace.text.tools import custom
from headrace.text.traits import Traits

logger = logging.getLogger("headrace.server")

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PARTS = ("text", "input_text", "output_text", "refusal")


class ToolCall(NamedTuple):
    """A call of an earlier turn. `form` is OpenAI's: id, type, and a function with name and arguments, the latter as
    an object or as JSON text. `field` names the arguments in the request, for errors."""

    form: dict[str, Any]
    field: str

    @classmethod
    def of(cls, call_id: str, name: str, arguments: Any, field: str) -> ToolCall:
        """Return a call with nothing but these."""
        return cls({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}, field)

    def is_well_formed(self) -> bool:
        """Whether the arguments are an object, or the text of one, or left out."""
        return self._object() is not None

    def template_form(self, text_arguments: bool) -> dict[str, Any]:
        """Return the call with its arguments as JSON text, as they came, or as an object: {} if they are none.

        A model can write a call that is cut or malformed. What the client sends back must not be refused for ever.
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
    tool_calls: list[ToolCall] = []
    extra: dict[str, Any] = {}

    def template_form(self, traits: Traits) -> dict[str, Any]:
        """Return the message as a template with these traits reads it."""
        role = "system" if self.role == "developer" and not traits.shows_developer else self.role
        message: dict[str, Any] = {"role": role, "content": self._content(traits), **self.extra}
        if self.tool_calls:
            message["tool_calls"] = [call.template_form(traits.text_arguments) for call in self.tool_calls]
        if self.reasoning is not None:
            # Templates read it under the one name or the other.
            message = {"thinking": self.reasoning, **message, "reasoning_content": self.reasoning}
        return message

    def _content(self, traits: Traits) -> str | list[dict[str, Any]] | None:
        form = traits.content_form
        if isinstance(self.content, list):
            return "\n".join(self.content) if form == "string" else [_part(text) for text in self.content]
        if isinstance(self.content, str):
            return [_part(self.content)] if form == "parts" else self.content
        if self.tool_calls and traits.takes_null:
            return None
        return [] if form == "parts" else ""


def check_role(role: object, field: str) -> str:
    """Return `role` if a template may get it. Raises `RequestError`."""
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise RequestError(field, role, "a string of 1 to 64 characters")
    return role


def read_messages(messages: Sequence[object]) -> list[ChatMessage]:
    """Return a request's `messages`, which are in OpenAI's form. Raises `RequestError`."""
    bounds.check("messages", messages)
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


class TemplateSource(Protocol):
    """What a template takes of a tokenizer: Jinja sources by name, and the text of special tokens by role."""

    chat_templates: dict[str, str]
    special_tokens: dict[str, str]


class ChatTemplate:
    """A model's chat template, or the one that replaces it."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        process: BoundedProcess | None = None,
        ends: Sequence[str] = (),
    ) -> None:
        """`sources`: Jinja sources by name. "tool_use", if there is one, serves requests with tools, "default" the
        others. `special_tokens`: the template's variables bos_token, eos_token and the like. `process`: runs
        `sandbox`; None: the process that all templates share. `ends`: texts that end an answer, where the model may
        not know them as such."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self.process = process or shared_process()
        self.ends = tuple(ends)
        self._traits: dict[str, Traits] = {}

    @classmethod
    def of(
        cls, tokenizer: TemplateSource, chat_template: str | None = None, process: BoundedProcess | None = None
    ) -> ChatTemplate:
        """Return the template of `tokenizer`, or of `chat_template`: a Jinja source, or the path of one.

        Raises `RequestError` if there is none.
        """
        sources = tokenizer.chat_templates
        if chat_template is not None:
            sources = {"default": _source(chat_template)}
        if not sources:
            raise RequestError("messages", "a conversation", "a prompt: the model has no chat template")
        return cls(sources, tokenizer.special_tokens, process)

    @property
    def sources(self) -> list[str]:
        """The Jinja sources."""
        return list(self._sources.values())

    def render(
        self,
        messages: Sequence[ChatMessage] | Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt for `messages` (or dicts in OpenAI's form), special tokens written out in it.

        `add_generation_prompt` ends it with the opening of an answer; `continue_final_message` leaves the last message
        open, so that the answer continues it. `kwargs` are further variables for the template. Raises `RequestError`
        for messages of the wrong shape, for ones that the template refuses, and where it exceeds its bounds.
        """
        bounds.check("messages", messages)
        for name in kwargs:
            if name in _RESERVED or name in self._special_tokens:
                raise RequestError("chat_template_kwargs", name, "a variable of the template's own")
        if add_generation_prompt and continue_final_message:
            raise RequestError("continue_final_message", True, "false, or add_generation_prompt be false")
        source = self._source_for(bool(tools))
        traits = self._traits_of(source)
        typed = _typed(messages)
        if self.moves_system(typed, bool(tools)):
            typed = _with_one_system(typed, traits)
        chat = [message.template_form(traits) for message in typed]
        if continue_final_message:
            if typed[-1].content is None or typed[-1].content is msgspec.UNSET:
                raise RequestError("continue_final_message", True, "false: the last message has no text to go on from")
            _mark(chat[-1])
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("documents", None)
        text = self._run(sandbox.RenderJob(source, variables), [message["role"] for message in chat]).text
        return _cut(text) if continue_final_message else text

    def traits(self, tools: bool = True) -> Traits:
        """Return what the template takes and writes that serves requests with tools, or those without."""
        return self._traits_of(self._source_for(tools))

    def dropped_arguments(self, messages: Sequence[ChatMessage], tools: bool) -> list[str]:
        """Return the fields of calls' arguments in whose place the template gets {}, for they are no JSON object."""
        if self.traits(tools).text_arguments:
            return []
        return [call.field for message in messages for call in message.tool_calls if not call.is_well_formed()]

    def moves_system(self, messages: Sequence[ChatMessage], tools: bool) -> bool:
        """Return whether there are system messages that the template does not take where they stand. A first one that
        follows another is added to it; a later one is given as the user's."""
        traits = self.traits(tools)
        return not traits.takes_late_system and any(_is_system(message, traits) for message in messages[1:])

    def _source_for(self, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise RequestError("tools", [], "given: the model's chat template needs them")
        return self._sources[name]

    def _traits_of(self, source: str) -> Traits:
        if source not in self._traits:
            job = sandbox.RenderJob(source, {**self._special_tokens, "documents": None}, finds_traits=True)
            try:
                self._traits[source] = self._run(job, []).traits
            except RequestError as error:
                # What is wrong with it, it will say of the conversation too.
                logger.warning("nothing can be found out about the chat template: %s", error)
                self._traits[source] = Traits()
        return self._traits[source]

    def _run(self, job: sandbox.RenderJob, roles: list[str]) -> sandbox.RenderResult:
        try:
            reply = self.process.run(job, sandbox.RenderResult)
        except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise RequestError("messages", roles, f"plain JSON in Unicode, not too deep ({error})") from None
        result = sandbox.RenderResult(error=reply) if isinstance(reply, str) else reply
        if result.error is not None:
            # Python's text of an object may hold its address, which clients must not learn.
            message = re.sub(r"0x[0-9a-fA-F]+", "0x...", result.error)[:500]
            raise RequestError("messages", roles, f"a conversation that the chat template takes; it says: {message}")
        return result


def check_source(source: str, field: str) -> None:
    """Raise a `RequestError` that names `field` unless the Jinja source of a chat template can be compiled."""
    reply = shared_process().run(sandbox.RenderJob(source, {}, finds_traits=True), sandbox.RenderResult)
    error = reply if isinstance(reply, str) else reply.error
    if error is not None:
        raise RequestError(field, source, f"a chat template in Jinja: {error[:200]}")


def new_process() -> BoundedProcess:
    """Return a process that renders templates."""
    return BoundedProcess(sandbox.__name__, sandbox.MAX_CPU_SECONDS)


@functools.cache
def shared_process() -> BoundedProcess:
    """Return the process that all templates share by default."""
    return new_process()


def _source(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise RequestError("chat_template", chat_template, "a Jinja template or the path of one")
    return path.read_text(encoding="utf-8")


def _typed(messages: Sequence[ChatMessage] | Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    typed = [message for message in messages if isinstance(message, ChatMessage)]
    return typed if len(typed) == len(messages) else read_messages(messages)


def _is_system(message: ChatMessage, traits: Traits) -> bool:
    return message.role == "system" or (message.role == "developer" and not traits.shows_developer)


def _with_one_system(messages: Sequence[ChatMessage], traits: Traits) -> list[ChatMessage]:
    """Return messages of which the first alone may be a system message. Neighbours of one role are put together: most
    templates that take no later one want the roles to alternate."""
    merged: list[ChatMessage] = []
    is_moved = False
    for message in messages:
        is_system = _is_system(message, traits)
        joins = bool(merged) and (is_system or (is_moved and message.role == "user"))
        if joins and (merged[-1].role == "user" or (is_system and _is_system(merged[-1], traits))):
            text = f"{_plain(merged[-1])}\n\n{_plain(message)}"
            merged[-1] = msgspec.structs.replace(merged[-1], content=text)
        elif is_system and merged:
            merged.append(ChatMessage(role="user", content=message.content))
        else:
            merged.append(message)
        is_moved = is_system and merged[-1].role == "user"
    return merged


def _plain(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "\n".join(message.content)
    return message.content if isinstance(message.content, str) else ""


def _read_message(message: object, field: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(field, message, "an object with role and content")
    role = check_role(message.get("role"), f"{field}.role")
    content = None if message.get("content") is None else _content(message["content"], f"{field}.content")
    calls = _tool_calls(message["tool_calls"], f"{field}.tool_calls") if message.get("tool_calls") else []
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    extra = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    return ChatMessage(role=role, content=content, reasoning=reasoning, tool_calls=calls, extra=extra)


def _content(content: object, field: str) -> str | list[str]:
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
        if part.get("type") not in _PARTS:
            raise RequestError(f"{field}[{i}].type", part.get("type"), "text: nothing else is read")
        name = "refusal" if part["type"] == "refusal" else "text"
        text = part.get(name)
        if not isinstance(text, str):
            raise RequestError(f"{field}[{i}].{name}", text, "a string")
        bounds.check("text", text, f"{field}[{i}].{name}")
        texts.append(text)
    return texts


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tool_calls(calls: object, field: str) -> list[ToolCall]:
    if not isinstance(calls, list):
        raise RequestError(field, calls, "a list")
    return [_tool_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, field: str) -> ToolCall:
    custom_call = call.get("custom") if isinstance(call, Mapping) and call.get("type") == "custom" else None
    if isinstance(custom_call, Mapping):
        call_id, name, text = call.get("id"), custom_call.get("name"), custom_call.get("input")
        if not isinstance(name, str) or not isinstance(text, str):
            raise RequestError(f"{field}.custom", custom_call, "an object with name and input, which are strings")
        return ToolCall.of(call_id, name, custom.arguments(text), f"{field}.custom.input")
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(field, call, "an object with a function that has a name")
    return ToolCall(call, f"{field}.function.arguments")


def _mark(message: dict[str, Any]) -> None:
    """Put a mark at the end of the last message's text, to find it in the rendered prompt."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _TAG
    else:
        content[-1]["text"] += _TAG


def _cut(text: str) -> str:
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise RequestError("continue_final_message", True, "false: the chat template leaves the last message out")
    # A template that trimmed the mark's space would also have trimmed the end of the message.
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
