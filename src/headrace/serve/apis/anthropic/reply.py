"""A chat's answer as Anthropic's message, whole or as its stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace.serve.apis.anthropic.request import MessagesRequest, marks_cache
from headrace.serve.call.answers import Answer, arguments_object
from headrace.text.parts import Content, MessagePart, Reasoning

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer:
    """A chat's answer as Anthropic tells it. Read it once, by `whole` or by `events`."""

    def __init__(self, answer: Answer, request: MessagesRequest, block_size: int) -> None:
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
        return head | {"content": content} | self._answer.call.warnings.reply()

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
        if marks_cache(self._request):
            written = max(num_prompt // self._block_size * self._block_size - num_read, 0)
        return {
            "input_tokens": num_prompt - num_read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": num_read,
            "output_tokens": len(self._state.token_ids),
        }


def _opening(part: MessagePart) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "text", "text": ""}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _delta(part: MessagePart) -> dict[str, Any] | None:
    if isinstance(part, Content):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments} if part.arguments else None


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event, named after its type."""
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
