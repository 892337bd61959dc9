"""Anthropic's Messages API: `/v1/messages`, whole or as its stream of events, and `/v1/messages/count_tokens`.

A request is translated into a chat of `serve.apis.openai.completions`'s, and the parts of its answer into content
blocks; sampling, templates, tools and admission are those of every chat. Whatever the API has and headrace has not is
refused or told in `warnings`. `serve.app` adds the routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.protocol.errors import QueueFullError, RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.completions import OpenAI
from headrace.serve.call.chat_answer import ChatAnswer
from headrace.serve.call.parsing import Body, add_warning, convert, renamed
from headrace.serve.call.reply_forms import MessageReply, TokenCount
from headrace.serve.call.translation import arguments_object
from headrace.serve.errors import error_body, json_response
from headrace.text.parts import Content, Part, Reasoning

IGNORED = {
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "the model runs where this server runs",
    "container": "there are no containers",
    "diagnostics": "usage tells what the cache had",
}
# What OpenAI's chat calls otherwise, for the errors of the parts below.
NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config",
    "reasoning_effort": "output_config.effort",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    # A mark for a cache that must be asked; headrace's caches every prompt.
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: list[Any] | None = None


class ImageBlock(_Block, tag="image"):
    source: dict[str, Any]


class DocumentBlock(_Block, tag="document"):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: str | None = None


class CountTokensRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Message]
    # Images are refused; as one of two kinds a block must say which it is.
    system: str | list[TextBlock | ImageBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None


def chat_body(request: CountTokensRequest) -> dict[str, Any]:
    """The chat of OpenAI's that a request asks for. Raises `RequestError`; may add to the request's warnings."""
    messages = [{"role": "system", "content": _system(request.system)}] if request.system else []
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]", request)
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.messages and request.messages[-1].role == "assistant":
        # A prefill: the answer goes on from the client's own beginning of it.
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    thinking = request.thinking
    if thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
        if thinking.type == "enabled" and thinking.budget_tokens is None:
            raise RequestError("thinking.budget_tokens", None, "given with type enabled")
        if thinking.type == "enabled":
            body["thinking_token_budget"] = thinking.budget_tokens
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "output", "schema": request.output_config.format.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.output_config is not None and request.output_config.effort is not None:
        effort = request.output_config.effort
        body["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if isinstance(request, MessagesRequest):
        names = {"max_tokens": "max_tokens", "stop_sequences": "stop", "stream": "stream"}
        names |= {name: name for name in ("temperature", "top_p", "top_k")}
        for theirs, ours in names.items():
            if getattr(request, theirs) is not None:
                body[ours] = getattr(request, theirs)
        if request.metadata is not None and request.metadata.user_id is not None:
            body["user"] = request.metadata.user_id
    return body


def _messages(message: Message, field: str, request: CountTokensRequest) -> list[dict[str, Any]]:
    """One turn as OpenAI's messages: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    calls: list[dict[str, Any]] = []
    reasoning = ""
    for index, block in enumerate(message.content):
        where = f"{field}.content[{index}]"
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if message.role != "user":
                raise RequestError(f"{where}.type", "tool_result", "in a message of the user's")
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, where)})
        elif isinstance(block, ImageBlock | DocumentBlock):
            raise _no_text(where, block)
        elif message.role != "assistant":
            raise RequestError(f"{where}.type", _tag(block), "in a message of the assistant's")
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            reasoning += block.thinking
        else:
            request.warn(where, "ignored: redacted thinking of another server can not be read here")
    if not texts and not calls and not reasoning:
        if not made and message.role == "assistant":
            raise RequestError(f"{field}.content", [], "at least one block that can be read")
        return made or [{"role": message.role, "content": ""}]
    turn: dict[str, Any] = {"role": message.role, "content": _text(texts) if texts else None}
    turn |= {"tool_calls": calls} if calls else {}
    turn |= {"reasoning_content": reasoning} if reasoning else {}
    return [*made, turn]


def _text(content: str | list[TextBlock]) -> str | list[dict[str, Any]]:
    """Text, or texts as parts, which the model's template puts together."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0].text
    return [{"type": "text", "text": block.text} for block in content]


def _system(content: str | list[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _no_text(f"system[{index}]", block)
    return _text([block for block in content if isinstance(block, TextBlock)])


def _result(block: ToolResultBlock, field: str) -> str | list[dict[str, Any]]:
    """What a tool gave; that it failed is said in words, for chat templates have no mark for it."""
    content = block.content or ""
    failed = "Error: " if block.is_error else ""
    if isinstance(content, str):
        return failed + content
    for index, inner in enumerate(content):
        if not isinstance(inner, TextBlock):
            raise _no_text(f"{field}.content[{index}]", inner)
    texts = [inner for inner in content if isinstance(inner, TextBlock)]
    parts = [{"type": "text", "text": inner.text} for inner in texts]
    if failed:
        parts.insert(0, {"type": "text", "text": failed})
    return parts or failed


def _tag(block: msgspec.Struct) -> str:
    return str(block.__struct_config__.tag)


def _no_text(field: str, block: msgspec.Struct) -> RequestError:
    return RequestError(f"{field}.type", _tag(block), "text: the models served here read nothing else")


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{field}.type", tool.type, "custom or left out: this server runs no tools of its own")
    if tool.input_schema is None:
        raise RequestError(f"{field}.input_schema", None, "given")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {} if tool.description is None else {"description": tool.description}
    function |= {} if tool.strict is None else {"strict": tool.strict}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name", None, "given with type tool")
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        body["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.disable_parallel_tool_use is not None:
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return body


def _marks_cache(request: CountTokensRequest) -> bool:
    """Whether any part of the request carries `cache_control`."""
    blocks: list[Any] = [request, *(request.tools or [])]
    blocks += request.system if isinstance(request.system, list) else []
    for message in request.messages:
        blocks += message.content if isinstance(message.content, list) else []
    return any(block.cache_control is not None for block in blocks)


class MessagesAnswer:
    """A chat's answer as Anthropic tells it. Read it once, by `whole` or by `events`."""

    def __init__(self, answer: ChatAnswer, request: MessagesRequest, block_size: int) -> None:
        self._answer = answer
        self._request = request
        self._block_size = block_size
        self._state = answer.generation.states[0]
        self.id = "msg_" + answer.id.partition("-")[2].replace("-", "")
        self.stream = bool(request.stream)

    def close(self) -> None:
        self._answer.close()

    async def whole(self) -> dict[str, Any]:
        """The message. Raises what the engine failed with."""
        await self._answer.collect()
        message = self._answer.message(0)
        content: list[dict[str, Any]] = []
        if message["reasoning_content"]:
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message["tool_calls"]:
            function = call["function"]
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": arguments_object(function["arguments"]),
                }
            )
        return self._head(content) | self._ending() | {"usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """message_start, the blocks one after the other, message_delta, message_stop. Raises what the engine failed
        with."""
        begun = False
        index, kind = -1, ""
        async for _, parts in self._answer.parts():
            if not begun:
                begun = True
                head = self._head([]) | {"stop_reason": None, "stop_sequence": None}
                yield event(
                    {"type": "message_start", "message": head | {"usage": self._usage() | {"output_tokens": 0}}}
                )
                yield event({"type": "ping"})
            for part in parts:
                opening = _opening(part)
                # A call's first part has its name, and begins a block even after another call.
                if opening["type"] != kind or (opening["type"] == "tool_use" and opening["name"] is not None):
                    if kind:
                        yield event({"type": "content_block_stop", "index": index})
                    index, kind = index + 1, opening["type"]
                    yield event({"type": "content_block_start", "index": index, "content_block": opening})
                delta = _delta(part)
                if delta is not None:
                    yield event({"type": "content_block_delta", "index": index, "delta": delta})
        if kind:
            yield event({"type": "content_block_stop", "index": index})
        yield event({"type": "message_delta", "delta": self._ending(), "usage": self._usage()})
        yield event({"type": "message_stop"})

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._request.model}
        warnings = [*self._request.warnings]
        for told in self._answer.request.warnings:
            field, _, why = told.partition(": ")
            add_warning(warnings, NAMES.get(field, field), why)
        return head | {"content": content} | ({"warnings": warnings} if warnings else {})

    def _ending(self) -> dict[str, Any]:
        finish = self._state.finish
        stop = finish.stop_reason if finish is not None else None
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = self._answer.finish_reason(0) or ""
        return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Three kinds of prompt tokens that add up: read from the cache, written to it (told if `cache_control` is
        in the request; whole blocks are), and others."""
        num_prompt, num_read = len(self._state.request.prompt_token_ids), self._state.num_cached_tokens
        written = 0
        if _marks_cache(self._request):
            written = max(num_prompt // self._block_size * self._block_size - num_read, 0)
        return {
            "input_tokens": num_prompt - num_read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": num_read,
            "output_tokens": len(self._state.token_ids),
        }


def _opening(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "text", "text": ""}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _delta(part: Part) -> dict[str, Any] | None:
    if isinstance(part, Content):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments} if part.arguments else None


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event, named after its type."""
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


def failure(error: BaseException) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    return _told(*error_body(error))


def refuse(error: BaseException) -> Response:
    """The reply that tells `error`."""
    status, body = error_body(error)
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
    return json_response(_told(status, body), status, headers)


def _told(status: int, body: dict[str, Any]) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def add_routes(app: FastAPI, api: OpenAI) -> None:
    """Add `/v1/messages` and `/v1/messages/count_tokens`."""

    async def messages(request: Request) -> Any:
        """Anthropic's Messages."""
        asked = convert(MessagesRequest, await routing.body(request), IGNORED)
        try:
            answer = await api.chat(chat_body(asked))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        made = MessagesAnswer(answer, asked, api.front.info.block_size)
        headers = {"request-id": made.id}
        return await routing.deliver(request, made, failure=lambda error: event(failure(error)), headers=headers)

    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has."""
        asked = convert(CountTokensRequest, await routing.body(request), IGNORED)
        try:
            _, token_ids = await api.chat_prompt(chat_body(asked))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        return json_response(
            {"input_tokens": len(token_ids)} | ({"warnings": asked.warnings} if asked.warnings else {})
        )

    routing.post(
        app, "/v1/messages", messages, refuse, takes=MessagesRequest, gives=MessageReply, streams="text/event-stream"
    )
    routing.post(app, "/v1/messages/count_tokens", count_tokens, refuse, takes=CountTokensRequest, gives=TokenCount)
