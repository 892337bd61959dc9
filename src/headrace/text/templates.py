"""Renders a conversation into the prompt of a model: runs the model's chat template on it.

The program `sandbox` renders templates in a process of bounded time, memory and output. Templates come from the model
or the server's flags, never from a request. A conversation that the template does not take is changed by `histories`.
Knows no tokens and no engine; called by `serve.call.service` and by the offline `chat`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from msgspec import UNSET

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
from headrace.text.histories.changes import OF_TOOLS, PLAIN, SMALL, Change, changed
from headrace.text.histories.conversation import Conversation
from headrace.text.messages import ChatMessage, read_messages
from headrace.text.traits import Traits

logger = logging.getLogger("headrace.server")

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateSource(Protocol):
    """The data of a tokenizer that a template needs: Jinja sources by name, the text of special tokens by role, and a
    text that goes before a prompt which does not begin with it."""

    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    begin_of_chats: str


class Rendering(NamedTuple):
    """A prompt, and the changes of the request that were necessary for the template."""

    text: str
    changes: list[Change]


class ChatTemplate:
    """A model's chat template, or the one that replaces it."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        process: BoundedProcess | None = None,
        ends: Sequence[str] = (),
        begin: str = "",
    ) -> None:
        """`sources`: Jinja sources by name. "tool_use", if there is one, serves requests with tools, "default" the
        others. `special_tokens`: the template's variables bos_token, eos_token and the like. `process`: runs
        `sandbox`; None: the process that all templates share. `ends`: texts that end an answer, where the model's files
        may not name them. `begin`: goes before a prompt that does not begin with it."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self.process = process or shared_process()
        self.ends, self.begin = tuple(ends), begin
        self._traits: dict[str, Traits] = {}
        self._logged: set[Change] = set()

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
        return cls(sources, tokenizer.special_tokens, process, begin=tokenizer.begin_of_chats)

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
        for messages of the wrong shape, for messages that the template refuses, and where rendering exceeds its bounds.
        Changes of the messages (see `histories`) are logged once.
        """
        rendering = self.rendering(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=kwargs,
        )
        for change in rendering.changes:
            if change not in self._logged:
                self._logged.add(change)
                logger.warning("%s: %s", change.field, change.why)
        return rendering.text

    def rendering(
        self,
        messages: Sequence[ChatMessage] | Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendering:
        """Return the prompt, as `render` does, and the changes of messages and tools that were necessary for the
        template. `variables` are further ones for the template."""
        bounds.check("messages", messages)
        for name in variables:
            if name in _RESERVED or name in self._special_tokens:
                raise RequestError("chat_template_kwargs", name, "a variable of the template's own")
        if add_generation_prompt and continue_final_message:
            raise RequestError("continue_final_message", True, "false, or add_generation_prompt be false")
        source = self._source_for(bool(tools))
        traits = self._traits_of(source)
        listed = [dict(tool) for tool in tools or []] or None
        original = Conversation(_typed(messages), listed, traits, self._example(traits), continue_final_message)
        if continue_final_message and original.messages[-1].content in (None, UNSET):
            raise RequestError("continue_final_message", True, "false: the last message has no text to go on from")
        every = {**self._special_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        every.setdefault("documents", None)
        tried: list[Conversation] = []
        for names in (traits.loses, traits.loses + traits.refuses, traits.loses + SMALL, (), PLAIN):
            # Without tools, the changes of tools have no effect.
            needed = [name for name in names if listed or name not in OF_TOOLS]
            conversation, changes = changed(original, needed) if needed else (original, [])
            if conversation in tried:
                continue
            tried.append(conversation)
            result = self._result(source, conversation, every)
            if result.error is None:
                text = _cut(result.text) if continue_final_message else result.text
                return Rendering(text if text.startswith(self.begin) else self.begin + text, changes)
            if len(tried) == 1:
                # Of several refusals, the first concerns the conversation that the client sent.
                refusal = _refusal(conversation, result.error)
            if not result.is_refusal:
                break
        raise refusal

    def _result(self, source: str, conversation: Conversation, variables: dict[str, Any]) -> sandbox.RenderResult:
        chat = [message.template_form(conversation.traits) for message in conversation.messages]
        if conversation.continues:
            _mark(chat[-1])
        job = sandbox.RenderJob(source, {**variables, "messages": chat, "tools": conversation.tools})
        try:
            return self._run(job)
        except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise RequestError(
                "messages", _roles(conversation), f"plain JSON in Unicode, not too deep ({error})"
            ) from None

    def _example(self, traits: Traits) -> str:
        """Return a call as the template writes it, without the marks of the turn around it; empty if it writes no
        calls."""
        text, at = traits.call, 0
        for letter in "".join(traits.opening.split()):
            while text[at : at + 1].isspace():
                at += 1
            if text[at : at + 1] != letter:
                break
            at += 1
        text = text[at:].strip()
        return text.removesuffix(self._special_tokens.get("eos_token", "")).strip()

    def traits(self, tools: bool = True) -> Traits:
        """Return the traits of the template for requests with tools, or of the one for requests without."""
        return self._traits_of(self._source_for(tools))

    def dropped_arguments(self, messages: Sequence[ChatMessage], tools: bool) -> list[str]:
        """Return the fields of calls' arguments that are no JSON object, so that the template gets {} in their
        place."""
        if self.traits(tools).text_arguments:
            return []
        return [call.field for message in messages for call in message.tool_calls if not call.is_well_formed()]

    def _source_for(self, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise RequestError("tools", [], "given: the model's chat template needs them")
        return self._sources[name]

    def _traits_of(self, source: str) -> Traits:
        if source not in self._traits:
            result = self._run(
                sandbox.RenderJob(source, {**self._special_tokens, "documents": None}, finds_traits=True)
            )
            if result.error is not None:
                # The same error will come when the conversation is rendered.
                logger.warning("nothing can be found out about the chat template: %s", result.error)
            self._traits[source] = result.traits
        return self._traits[source]

    def _run(self, job: sandbox.RenderJob) -> sandbox.RenderResult:
        reply = self.process.run(job, sandbox.RenderResult)
        return sandbox.RenderResult(error=reply) if isinstance(reply, str) else reply


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


def _roles(conversation: Conversation) -> list[str]:
    return [message.role for message in conversation.messages]


def _refusal(conversation: Conversation, error: str) -> RequestError:
    # Python's text of an object may contain its address, which must not reach clients.
    message = re.sub(r"0x[0-9a-fA-F]+", "0x...", error)[:500]
    bound = f"a conversation that the chat template takes; it says: {message}"
    return RequestError("messages", _roles(conversation), bound)


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
