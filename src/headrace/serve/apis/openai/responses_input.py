"""A Responses request translated: its fields, and its input items as the messages of a chat.

Everything that would make the answer another one and can not be honoured is refused by name; what changes nothing
ends in `warnings`. Pure functions; called by `serve.apis.openai.responses`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.serve.call.parsing import Body, convert
from headrace.serve.call.schema import IGNORED, UNSUPPORTED, ChatCompletionRequest

MAX_METADATA = 16
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")
LOGPROBS = "message.output_text.logprobs"


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`text.format`: free text, any JSON object, or JSON by a schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses. The sampling parameters of chat completions are taken beside these fields."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None


# Fields of a chat that a Responses request says in its own words.
_OWN_WORDS = frozenset(
    "messages n stream stream_options max_tokens max_completion_tokens logprobs response_format tools tool_choice "
    "reasoning_effort verbosity store functions function_call add_generation_prompt continue_final_message".split()
)
PASSED_ON = frozenset({*ChatCompletionRequest.__struct_fields__, *UNSUPPORTED, *IGNORED}) - _OWN_WORDS


def read(body: Mapping[str, Any]) -> tuple[ResponsesRequest, dict[str, Any]]:
    """The request, and what of the chat's own parameters came with it. Raises `RequestError`."""
    own = frozenset(ResponsesRequest.__struct_fields__)
    more = {name: value for name, value in body.items() if name in PASSED_ON and name not in own}
    request = convert(ResponsesRequest, {name: value for name, value in body.items() if name not in more})
    for name in ("conversation", "prompt", "context_management"):
        if getattr(request, name) is not None:
            raise RequestError(name, getattr(request, name), "left out: headrace does not support it")
    if request.background and request.stream:
        raise RequestError("stream", True, "false for a response in the background; read it by its id")
    if request.background and request.store is False:
        raise RequestError("store", False, "true for a response in the background: it is read by its id")
    if request.truncation not in (None, "auto", "disabled"):
        raise RequestError("truncation", request.truncation, "auto or disabled")
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
        raise RequestError("metadata", len(metadata), f"at most {MAX_METADATA} keys of 64 and values of 512 characters")
    if request.top_logprobs is not None:
        bounds.check("logprobs", request.top_logprobs, "top_logprobs")
    _warn(request)
    return request, more


def _warn(request: ResponsesRequest) -> None:
    for name in ("max_tool_calls", "prompt_cache_retention"):
        if getattr(request, name) is not None:
            request.warn(name, "not honoured, and ignored")
    if request.service_tier not in (None, "auto", "default"):
        request.warn("service_tier", "there is one tier")
    for value in request.include or []:
        if value != LOGPROBS:
            request.warn("include", f"{value[:60]!r} is not known here, and ignored")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        request.warn("text.verbosity", "the models served here have no such setting")
    if request.reasoning is not None and (request.reasoning.summary or request.reasoning.generate_summary):
        request.warn("reasoning.summary", "no summary is made; the reasoning itself is told")
    if request.stream_options and set(request.stream_options) - {"include_obfuscation"}:
        request.warn("stream_options", "not honoured, and ignored")


def chat_body(request: ResponsesRequest, items: Iterable[Mapping[str, Any]], more: Mapping[str, Any]) -> dict[str, Any]:
    """The same request as a chat's. Raises `RequestError`."""
    body: dict[str, Any] = dict(more)
    body["messages"] = messages_of(request.instructions, items)
    given = {
        "model": request.model,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
    }
    body |= {name: value for name, value in given.items() if value is not None}
    if request.top_logprobs or LOGPROBS in (request.include or []):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    tools, choice = _tools(request)
    if tools:
        body |= {"tools": tools, "tool_choice": choice}
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    form = None if request.text is None else request.text.format
    if form is not None and form.type != "text":
        body["response_format"] = _format(form)
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    return body


def _format(form: TextFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema":
        raise RequestError("text.format.type", form.type, "text, json_object or json_schema")
    if form.schema is None:
        raise RequestError("text.format.schema", None, "given")
    fields: dict[str, Any] = {"name": form.name or "answer", "schema": form.schema}
    fields |= {"strict": form.strict, "description": form.description}
    return {"type": "json_schema", "json_schema": {name: x for name, x in fields.items() if x is not None}}


def _tools(request: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    """Tools and tool_choice as a chat has them."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(request.tools or []):
        if tool.get("type") != "function":
            raise RequestError(f"tools[{index}].type", tool.get("type"), "function: headrace runs no tools of its own")
        if not isinstance(tool.get("name"), str):
            raise RequestError(f"tools[{index}].name", tool.get("name"), "a string")
        fields = ("name", "description", "parameters", "strict")
        function = {field: tool[field] for field in fields if tool.get(field) is not None}
        tools.append({"type": "function", "function": function})
    choice: Any = request.tool_choice or "auto"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        named = {tool.get("name") for tool in allowed if isinstance(tool, dict)} if isinstance(allowed, list) else set()
        tools = [tool for tool in tools if tool["function"]["name"] in named]
        choice = choice.get("mode", "auto")
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise RequestError("tool_choice", choice, "auto, none, required, or a function by its name")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if not tools and choice not in ("auto", "none"):
        raise RequestError("tool_choice", choice, "auto, none or left out where there are no tools")
    return tools, choice


def input_items(request: ResponsesRequest, new_id: str) -> list[dict[str, Any]]:
    """The request's own input as items with ids, as `input_items` lists them. Raises `RequestError`."""
    given: list[Any] = [request.input] if isinstance(request.input, str) else request.input
    if not given:
        raise RequestError("input", given, "a text, or at least one item")
    bounds.check("messages", given, "input")
    items = []
    for index, item in enumerate(given):
        if isinstance(item, str):
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": item}]}
        if not isinstance(item, dict):
            raise RequestError(f"input[{index}]", item, "a text or an item")
        read: dict[str, Any] = {"type": "message"} | item if "role" in item else dict(item)
        if read.get("type") == "message" and isinstance(read.get("content"), str):
            kind = "output_text" if read.get("role") == "assistant" else "input_text"
            read["content"] = [{"type": kind, "text": read["content"]}]
        items.append(read | {"id": read.get("id") or f"msg_{new_id}_in{index}"})
    return items


def messages_of(instructions: str | None, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as a chat's messages. Reasoning, text and calls of one turn of the model are one message.

    Raises `RequestError` for what is no item that a chat can carry.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        kind, field = item.get("type"), f"input[{index}]"
        if kind == "message":
            _add_message(messages, item, field)
        elif kind == "reasoning":
            texts = [_text(item.get(part) or [], f"{field}.{part}") for part in ("content", "summary")]
            _turn(messages)["reasoning_content"] = next((text for text in texts if text), "")
        elif kind == "function_call":
            call_id, name, arguments = (_string(item, part, field) for part in ("call_id", "name", "arguments"))
            names[call_id] = name
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            _turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id, output = _string(item, "call_id", field), item.get("output")
            made = {"role": "tool", "tool_call_id": call_id, "content": _text(output, f"{field}.output")}
            messages.append(made | ({"name": names[call_id]} if call_id in names else {}))
        else:
            known = "message, function_call, function_call_output or reasoning"
            raise RequestError(f"{field}.type", kind, known)
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], field: str) -> None:
    role, text = item.get("role"), _text(item.get("content"), f"{field}.content")
    if role not in ROLES:
        raise RequestError(f"{field}.role", role, "one of " + ", ".join(ROLES))
    if role == "assistant":
        turn = _turn(messages, fresh="content")
        turn["content"] = text
    elif role == "user":
        messages.append({"role": "user", "content": text})
    elif len(messages) == 1 and messages[0]["role"] == "system":
        # Templates take one system message, and take it first.
        messages[0]["content"] += "\n\n" + text
    else:
        messages.append({"role": "system", "content": text})


def _turn(messages: list[dict[str, Any]], fresh: str | None = None) -> dict[str, Any]:
    """The model's turn that is being read; a new one if the last message is not its own, or has `fresh` already."""
    if not messages or messages[-1]["role"] != "assistant" or fresh in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(field, content, "a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(_string(part, "refusal", f"{field}[{index}]"))
        elif kind in TEXT_PARTS:
            texts.append(_string(part, "text", f"{field}[{index}]"))
        else:
            raise RequestError(f"{field}[{index}].type", kind, "input_text or output_text: nothing else is read")
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name}", value, "a string")
    return value
