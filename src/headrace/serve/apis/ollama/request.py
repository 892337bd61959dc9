"""The bodies of Ollama's requests."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.protocol.errors import RequestError
from headrace.serve.apis.ollama.options import Asked
from headrace.serve.call.parsing import Body


class Function(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    function: Function
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None
    raw: bool | None = None


class EmbedRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed, and under its older name /api/embeddings, which has one `prompt`."""

    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class ShowRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show and /api/pull; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None


def chat_message(message: Message, field: str) -> dict[str, Any]:
    if message.images:
        raise RequestError(f"{field}.images", "images", "left out: the models served here read text")
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_name:
        made["name"] = message.tool_name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made
