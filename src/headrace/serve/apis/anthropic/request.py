"""The bodies of Anthropic's requests, and how they become a chat.

What the API has and headrace has not is refused or listed in `warnings`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.protocol.errors import RequestError
from headrace.serve.call.parsing import Body

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


def marks_cache(request: CountTokensRequest) -> bool:
    """Whether any part of the request carries `cache_control`."""
    blocks: list[Any] = [request, *(request.tools or [])]
    blocks += request.system if isinstance(request.system, list) else []
    for message in request.messages:
        blocks += message.content if isinstance(message.content, list) else []
    return any(block.cache_control is not None for block in blocks)
