"""From a conversation to the one text that a model reads: messages put in order, then the model's chat template.

Every rendering of any template goes through `TemplateRunner.run`, which hands it to a sandboxed process of bounded
time, memory and output. Templates come from the model or from who runs the server, never from a request. Knows no
tokens and no engine; called by the server's routes and by the offline `chat`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A model's chat template, or the one given in its place."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], runner: TemplateRunner | None = None
    ) -> None:
        """`sources`: Jinja sources by name. "tool_use", if there is one, serves requests with tools, "default" the
        others. `special_tokens`: what the template sees under bos_token, eos_token and the like."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._runner = runner or shared_runner()
        self._forms: dict[str, sandbox.ContentForm] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: str | None = None) -> ChatTemplate:
        """The template that came with `tokenizer`, or `chat_template`: a Jinja source, or the path of one.

        Raises `RequestError` if there is none.
        """
        sources = tokenizer.chat_templates
        if chat_template is not None:
            sources = {"default": _source(chat_template)}
        if not sources:
            raise RequestError("messages", "a conversation", "a prompt: the model has no chat template")
        return cls(sources, tokenizer.special_tokens)

    @property
    def sources(self) -> list[str]:
        """The Jinja sources."""
        return list(self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages` (OpenAI's form), special tokens written out in it.

        `add_generation_prompt` ends it with the opening of an answer; `continue_final_message` leaves the last
        message open, to be gone on with. `kwargs` are further variables for the template. Raises `RequestError` for
        messages of the wrong shape, for ones that the template refuses, and where it exceeds its bounds.
        """
        bounds.check("messages", messages)
        for name in kwargs:
            if name in _RESERVED or name in self._special_tokens:
                raise RequestError("chat_template_kwargs", name, "a variable of the template's own")
        if add_generation_prompt and continue_final_message:
            raise RequestError("continue_final_message", True, "false, or add_generation_prompt be false")
        source = self._source_for(bool(tools))
        chat = [_message(message, f"messages[{i}]", self._form(source)) for i, message in enumerate(messages)]
        if continue_final_message:
            _mark(chat[-1])
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("documents", None)
        roles = [message["role"] for message in chat]
        try:
            text = self._run(source, variables, roles).text
        except RequestError:
            # Most templates want the arguments of calls as an object, some as the text that clients send.
            as_text = [_with_text_arguments(message) for message in chat]
            if as_text == chat:
                raise
            text = self._run(source, {**variables, "messages": as_text}, roles).text
        return _cut(text) if continue_final_message else text

    def _source_for(self, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise RequestError("tools", [], "given: the model's chat template needs them")
        return self._sources[name]

    def _form(self, source: str) -> sandbox.ContentForm:
        if source not in self._forms:
            self._forms[source] = self._run(source, None, []).content_form
        return self._forms[source]

    def _run(self, source: str, variables: dict[str, Any] | None, roles: list[str]) -> sandbox.Result:
        try:
            result = self._runner.run(sandbox.Job(source, variables))
        except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise RequestError("messages", roles, f"plain JSON in Unicode, not too deep ({error})") from None
        if result.error is not None:
            # What Python says of an object may hold its address, which is nobody's business.
            said = re.sub(r"0x[0-9a-fA-F]+", "0x...", result.error)[:500]
            raise RequestError("messages", roles, f"a conversation that the chat template takes; it says: {said}")
        return result


class TemplateRunner:
    """One sandbox process, started when it is first needed and again after it had to be killed.

    One job at a time, in whichever thread calls; a job that is ended for its bounds delays only others of this runner.
    """

    def __init__(self, max_cpu_seconds: float = sandbox.MAX_CPU_SECONDS) -> None:
        """`max_cpu_seconds`: processor time of one job, after which its process is killed."""
        self._process = BoundedProcess(sandbox.__name__, [str(max_cpu_seconds)], max_cpu_seconds)

    def run(self, job: sandbox.Job) -> sandbox.Result:
        """Render. Raises what msgspec raises for variables that are not plain JSON; all else is in the result."""
        reply = self._process.ask(msgspec.msgpack.encode(job))
        if isinstance(reply, str):
            return sandbox.Result(error=reply)
        return msgspec.msgpack.decode(reply, type=sandbox.Result)

    def close(self) -> None:
        """End the process. A later `run` starts another."""
        self._process.close()


@functools.cache
def shared_runner() -> TemplateRunner:
    """The runner of all templates that nobody gave one of their own."""
    return TemplateRunner()


def _source(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise RequestError("chat_template", chat_template, "a Jinja template or the path of one")
    return path.read_text(encoding="utf-8")


def _message(message: object, field: str, form: sandbox.ContentForm) -> dict[str, Any]:
    """One message in the form that templates read."""
    if not isinstance(message, Mapping):
        raise RequestError(field, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise RequestError(f"{field}.role", role, "a string of 1 to 64 characters")
    read = dict(message)
    if read.get("content") is not None:
        read["content"] = _content(read["content"], f"{field}.content", form)
    elif role != "assistant" or not any(read.get(key) for key in ("tool_calls", "function_call", *_REASONING)):
        raise RequestError(f"{field}.content", None, "a string or a list of text parts")
    if read.get("tool_calls"):
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{field}.tool_calls")
    reasoning = next((read[key] for key in _REASONING if read.get(key) is not None), None)
    if reasoning is not None:
        # Templates read it under the one name or the other.
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    return read


def _content(content: object, field: str, form: sandbox.ContentForm) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        bounds.check("text", content, field)
        return [{"type": "text", "text": content}] if form == "parts" else content
    if not isinstance(content, list):
        raise RequestError(field, content, "a string or a list of text parts")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RequestError(f"{field}[{i}]", part, "an object with type and text")
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise RequestError(f"{field}[{i}].type", part.get("type"), "text: nothing else is read")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{field}[{i}].text", part.get("text"), "a string")
        bounds.check("text", part["text"], f"{field}[{i}].text")
        parts.append({"type": "text", "text": part["text"]})
    return "\n".join(part["text"] for part in parts) if form == "string" else parts


def _tool_calls(calls: object, field: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object: clients send them back as the JSON text that they got."""
    if not isinstance(calls, list):
        raise RequestError(field, calls, "a list")
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field}[{i}]", call, "an object with a function that has a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise RequestError(f"{field}[{i}].function.arguments", arguments, "a JSON object") from None
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _mark(message: dict[str, Any]) -> None:
    """Put a mark at the end of the last message's text, to find it in the rendered prompt."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAG
    elif content:
        content[-1]["text"] += _TAG
    else:
        raise RequestError("continue_final_message", True, "false: the last message has no text to go on from")


def _cut(text: str) -> str:
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise RequestError("continue_final_message", True, "false: the chat template leaves the last message out")
    # A template that trimmed the mark's space would have trimmed the message's own.
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
