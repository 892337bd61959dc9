"""A chat's answer as Anthropic's message, whole or as its stream of events, and Anthropic's errors."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from headrace.protocol.errors import ContextLengthError
from headrace.serve.apis.anthropic.request import MessagesRequest, marks_cache
from headrace.serve.call.call import Answer, arguments_object
from headrace.serve.call.parsing import WarningLines
from headrace.serve.errors import Api, ErrorBody, event
from headrace.serve.routing import Readable
from headrace.text.outputs import Content, MessagePart, Reasoning

# The statuses whose errors have another type than OpenAI's; `_error` renames "server_error" itself.
ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody


def _error(status: int, body: ErrorBody) -> AnthropicError:
    kind = ERROR_TYPES.get(status, "api_error" if body.type == "server_error" else body.type)
    return AnthropicError(error=AnthropicErrorBody(type=kind, message=body.message))


def _overflow(error: ContextLengthError) -> str:
    """Return the error in Anthropic's own words, in which clients search for the numbers."""
    if not error.num_answer:
        return f"prompt is too long: {error.num_prompt} tokens > {error.max_model_len - 1} maximum"
    sizes = f"{error.num_prompt} + {error.num_answer} > {error.max_model_len}"
    return f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens`"


HEARTBEAT = event({"type": "ping"}, "ping")
API = Api(AnthropicError, _error, functools.partial(event, name="error"), ("/v1/messages",), _overflow, HEARTBEAT)


class ReplyText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ReplyThinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ReplyToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = ReplyText | ReplyThinking | ReplyToolUse


class MessageUsage(msgspec.Struct, kw_only=True):
    """Three kinds of prompt tokens that add up: read from the cache, written to it, and others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(msgspec.Struct, kw_only=True):
    """POST /v1/messages. In the first event of a stream there is no stop reason yet."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    warnings: WarningLines = UNSET
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    input_tokens: int
    warnings: WarningLines = UNSET


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJsonDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | InputJsonDelta


class StopDelta(msgspec.Struct, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    message: MessageReply


class Ping(msgspec.Struct, kw_only=True, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessagesAnswer(Readable):
    """A chat's answer as Anthropic's message. Read it once, by `whole` or by `events`."""

    answer: Answer

    def __init__(self, answer: Answer, request: MessagesRequest, block_size: int) -> None:
        super().__init__(answer, bool(request.stream))
        self._request = request
        self._block_size = block_size
        self._state = answer.generation.states[0]
        self.id = "msg_" + answer.id.partition("-")[2].replace("-", "")
        self.headers = {"request-id": self.id}

    async def whole(self) -> MessageReply:
        """Return the message. Raises the engine's errors."""
        await self.answer.collect()
        message = self.answer.message(0)
        content: list[Block] = []
        if message.reasoning:
            content.append(ReplyThinking(thinking=message.reasoning))
        if message.content:
            content.append(ReplyText(text=message.content))
        for call in message.calls:
            arguments = arguments_object(call["arguments"])
            content.append(ReplyToolUse(id=call["id"], name=call["name"], input=arguments))
        return self._message(content, self._ending())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield message_start, the blocks one after the other, message_delta, message_stop. Raises the engine's
        errors."""
        # At once: a long prompt takes minutes, and clients give up on a silent stream. The count of cached tokens is in
        # the last event's usage.
        yield _event(MessageStart(message=self._message([], None)))
        yield _event(Ping())
        index, kind = -1, ""
        async for _, _, parts in self.answer.parts():
            for part in parts:
                part_kind = type(part).__name__
                gap = getattr(part, "gap", "") if part_kind == kind else ""
                # The first part of a call has the call's name, and begins a new block even after another call.
                if part_kind != kind or getattr(part, "name", None) is not None:
                    if kind:
                        yield _event(BlockStop(index=index))
                    index, kind = index + 1, part_kind
                    yield _event(BlockStart(index=index, content_block=_opening(part)))
                delta = _delta(part, gap)
                if delta is not None:
                    yield _event(BlockDelta(index=index, delta=delta))
        if kind:
            yield _event(BlockStop(index=index))
        yield _event(MessageDelta(delta=self._ending(), usage=self._usage()))
        yield _event(MessageStop())

    def _message(self, content: list[Block], ending: StopDelta | None) -> MessageReply:
        usage = self._usage()
        if ending is None:
            usage.output_tokens = 0
        return MessageReply(
            id=self.id,
            model=self._request.model,
            content=content,
            warnings=self.answer.call.warnings.reply(),
            stop_reason=None if ending is None else ending.stop_reason,
            stop_sequence=None if ending is None else ending.stop_sequence,
            usage=usage,
        )

    def _ending(self) -> StopDelta:
        finish = self._state.finish
        stop = finish.stop_reason if finish is not None else None
        if isinstance(stop, str):
            return StopDelta(stop_reason="stop_sequence", stop_sequence=stop)
        reason = self.answer.finish_reason(0) or ""
        return StopDelta(stop_reason=STOP_REASONS.get(reason, "end_turn"), stop_sequence=None)

    def _usage(self) -> MessageUsage:
        """Count the tokens. Tokens of whole blocks count as written to the cache if `cache_control` is in the
        request."""
        num_prompt, num_cached = len(self._state.request.prompt_token_ids), self._state.num_cached_tokens
        num_written = 0
        if marks_cache(self._request):
            num_written = max(num_prompt // self._block_size * self._block_size - num_cached, 0)
        return MessageUsage(
            input_tokens=num_prompt - num_cached - num_written,
            cache_creation_input_tokens=num_written,
            cache_read_input_tokens=num_cached,
            output_tokens=len(self._state.token_ids),
        )


def _opening(part: MessagePart) -> Block:
    """Return the empty block that a part begins."""
    if isinstance(part, Content):
        return ReplyText(text="")
    if isinstance(part, Reasoning):
        return ReplyThinking(thinking="")
    return ReplyToolUse(id=part.id, name=part.name or "", input={})


def _delta(part: MessagePart, gap: str) -> Delta | None:
    """Return the text that a part adds to its block after a `gap`, or None."""
    if isinstance(part, Content):
        return TextDelta(text=gap + part.text)
    if isinstance(part, Reasoning):
        return ThinkingDelta(thinking=gap + part.text)
    return InputJsonDelta(partial_json=part.arguments) if part.arguments else None


def _event(body: MessageEvent) -> bytes:
    """Return one server-sent event, named after its type."""
    return event(body, str(body.__struct_config__.tag))
