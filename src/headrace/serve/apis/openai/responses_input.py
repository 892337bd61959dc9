"""A Responses request: its fields as a `ChatCall`, and its input items as the call's messages.

A field that changes the answer and cannot be honoured is refused by name; a field without effect ends in `warnings`.
Pure functions; called by `serve.apis.openai.responses`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.protocol import bounds
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.protocol.parameters import OPENAI
from headrace.serve.apis.openai.completions import answer_form, beam_params, check_stream, set_options
from headrace.serve.apis.openai.responses_tools import HOSTED_ITEMS, ClientTools, client_tools, flat_name
from headrace.serve.call.call import ChatCall, SamplingFields, spelled
from headrace.serve.call.parsing import Body, Warnings, convert
from headrace.serve.call.schema import (
    IGNORED,
    IN_ANOTHER_FORM,
    UNSUPPORTED,
    Sampled,
    check_labels,
    check_metadata,
    parse,
)
from headrace.text.messages import LEFT_OUT, ChatMessage, PastCall, first_new, picture_part, placeholder
from headrace.text.pictures.marks import Pictures
from headrace.text.tools.custom import arguments

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items that are calls, with the field that holds the tool's input."""
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEMS = "message, reasoning, function_call, custom_tool_call, or the output of a call"
REFERENCE = "item_reference"
"""An item of a stored response, by its id."""
LOGPROBS = "message.output_text.logprobs"
_ITEM_ID = re.compile("[a-z]+_([0-9a-f]{32})_(?:in)?[0-9]{1,9}")


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
    """POST /v1/responses. The sampling parameters of chat completions are accepted too (`SharedParameters`)."""

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
    conversation: str | dict[str, Any] | None = None
    prompt: Any = None
    context_management: Any = None


class SharedParameters(Sampled, forbid_unknown_fields=True, kw_only=True):
    """The parameters of chat completions that a Responses request may have in addition to its own fields."""

    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_NOT_SHARED = frozenset(
    "n stream stream_options max_tokens response_format verbosity store functions function_call return_progress".split()
)
SHARED = frozenset({*SharedParameters.__struct_fields__, *UNSUPPORTED, *IGNORED}) - _NOT_SHARED
# The engine's fields, and the fields of this request that set them.
SPELLING = {
    "max_tokens": "max_output_tokens",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "prompt": "input",
}

UNSUPPORTED_HERE = {
    "prompt": "stored prompts are not kept; send input and instructions",
    "context_management": "use truncation, or a shorter input",
}


def read(body: Mapping[str, Any]) -> tuple[ResponsesRequest, SharedParameters]:
    """Return the request, and the parameters of a chat that came with it. Raises `RequestError`."""
    own_names = frozenset(ResponsesRequest.__struct_fields__)
    more = {name: value for name, value in body.items() if name in SHARED and name not in own_names}
    request = convert(ResponsesRequest, {name: value for name, value in body.items() if name not in more})
    for name, instead in UNSUPPORTED_HERE.items():
        if getattr(request, name) is not None:
            raise UnsupportedError(name, getattr(request, name), instead)
    if request.background and request.store is False:
        raise RequestError("store", False, "true for a response in the background: it is read by its id")
    if request.previous_response_id is not None and conversation_of(request) is not None:
        raise RequestError(
            "previous_response_id", request.previous_response_id, "left out where there is a conversation"
        )
    if request.truncation not in (None, "auto", "disabled"):
        raise RequestError("truncation", request.truncation, "auto or disabled")
    check_metadata(request.metadata)
    check_labels(request)
    if request.top_logprobs is not None:
        bounds.check("logprobs", request.top_logprobs, "top_logprobs")
    _warn(request)
    return request, parse(SharedParameters, more)


def conversation_of(request: ResponsesRequest) -> str | None:
    """Return the id of the conversation that a request is a part of. Raises `RequestError`."""
    conversation = request.conversation
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
        if not isinstance(conversation, str):
            raise RequestError("conversation.id", conversation, "the id of a conversation")
    return conversation


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
        request.warn("reasoning.summary", "no summary is made; the reply has the reasoning itself")
    if request.stream_options and set(request.stream_options) - {"include_obfuscation"}:
        request.warn("stream_options", "not honoured, and ignored")


def chat_call(request: ResponsesRequest, shared: SharedParameters) -> tuple[ChatCall, ClientTools]:
    """Return the request as a call, without its messages, and its tools. Raises `RequestError`."""
    check_stream(shared, bool(request.stream))
    shared_form, spelling = answer_form(shared)
    more = SamplingFields.of(shared, OPENAI, but=IN_ANOTHER_FORM)
    beam, form = beam_params(shared), _form(request)
    if form is not None and shared_form is not None:
        [name] = spelling.values()
        raise RequestError("text.format", "an object", f"left out: {name} says what form the answer has")
    sampling = SamplingFields.of(request, OPENAI).over(more)
    sampling.max_tokens = request.max_output_tokens
    if request.top_logprobs or LOGPROBS in (request.include or []):
        sampling.logprobs = request.top_logprobs or 0
    warnings = Warnings([*request.warnings, *shared.warnings])
    parallel = request.parallel_tool_calls is not False
    tools = client_tools(request.tools or [], request.tool_choice, parallel, warnings)
    call = ChatCall(
        model=request.model,
        sampling=sampling,
        form=shared_form if form is None else form,
        beam=beam,
        stream=bool(request.stream),
        warnings=warnings,
        spelling=SPELLING | spelling,
        messages=[],
        tools=tools.use,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        include_reasoning=shared.include_reasoning is not False,
        template_variables=shared.chat_template_kwargs or {},
    )
    set_options(call, shared)
    return call, tools


def _form(request: ResponsesRequest) -> StructuredOutputs | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutputs(json_object=True)
    if form.type != "json_schema":
        raise RequestError("text.format.type", form.type, "text, json_object or json_schema")
    if form.schema is None:
        raise RequestError("text.format.schema", None, "given")
    with spelled(SPELLING):
        return StructuredOutputs(json=form.schema)


def input_items(request: ResponsesRequest, new_id: str) -> list[dict[str, Any]]:
    """Return the request's own input as items with ids, as `input_items` lists them. Raises `RequestError`."""
    entries: list[Any] = [request.input] if isinstance(request.input, str) else request.input
    if not entries:
        raise RequestError("input", entries, "a text, or at least one item")
    bounds.check("messages", entries, "input")
    items = []
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            entry = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": entry}]}
        if not isinstance(entry, dict):
            raise RequestError(f"input[{index}]", entry, "a text or an item")
        item: dict[str, Any] = {"type": "message"} | entry if "role" in entry else dict(entry)
        if item.get("type") is None and isinstance(item.get("id"), str):
            item["type"] = REFERENCE
        if item.get("type") == REFERENCE:
            _string(item, "id", f"input[{index}]")
        if not isinstance(item.get("type"), str):
            raise RequestError(f"input[{index}].type", item.get("type"), ITEMS)
        if item.get("type") == "message" and isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item | {"id": item.get("id") or f"msg_{new_id}_in{index}"})
    return items


def response_of_item(item_id: str) -> str | None:
    """Return the hexadecimal part of the id of the response that an item belongs to, or None for an id that this server
    did not make."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else match[1]


class NamedItem(NamedTuple):
    """An item, and its name in the request, for errors."""

    field: str
    item: Mapping[str, Any]


def without_hosted(items: Sequence[NamedItem], warnings: Warnings) -> list[NamedItem]:
    """Return the items that a chat can carry. Calls of tools that are not served here, and their results, are left out
    with one warning, so that a conversation that began at another provider goes on."""
    hosted = [item["type"] for _, item in items if item.get("type") in HOSTED_ITEMS]
    if hosted:
        kinds = ", ".join(dict.fromkeys(hosted))
        warnings.add("input", f"{len(hosted)} items of tools that are not served here are left out: {kinds}")
    return [each for each in items if each.item.get("type") not in HOSTED_ITEMS]


def messages_of(
    instructions: str | None, items: Sequence[NamedItem], warnings: Warnings, pictures: Pictures
) -> list[ChatMessage]:
    """Return items as a chat's messages. Reasoning, text and calls of one turn of the model are one message.

    `pictures` gets the pictures, for which marks stand in the texts. Another part that the model cannot read is refused
    in the user's items after the model's last turn. In earlier items and in outputs a short text stands in its place,
    with a warning. Raises `RequestError` for an item that a chat cannot hold.
    """
    turns = ("reasoning", *CALLS)
    new = first_new(["assistant" if item.get("type") in turns else item.get("role") for _, item in items] + [None])
    messages: list[ChatMessage] = []
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    names: dict[str, str] = {}
    for place, (field, item) in enumerate(items):
        kind = item.get("type")
        if kind == "message":
            is_new = place >= new and item.get("role") == "user"
            _add_message(messages, item, field, None if is_new else warnings, pictures)
        elif kind == "reasoning":
            texts = [_text(item.get(part) or [], f"{field}.{part}", warnings) for part in ("content", "summary")]
            _turn(messages).reasoning = next((text for text in texts if text), "")
        elif kind in CALLS:
            call_id, name, value = (_string(item, part, field) for part in ("call_id", "name", CALLS[kind]))
            names[call_id] = name = flat_name(item.get("namespace"), name)
            values = value if kind == "function_call" else arguments(value)
            _turn(messages).tool_calls.append(PastCall.of(call_id, name, values, f"{field}.{CALLS[kind]}"))
        elif kind in OUTPUTS:
            call_id = _string(item, "call_id", field)
            extra = {"tool_call_id": call_id} | ({"name": names[call_id]} if call_id in names else {})
            messages.append(
                ChatMessage(
                    role="tool", content=_text(item.get("output"), f"{field}.output", warnings, pictures), extra=extra
                )
            )
        else:
            raise RequestError(f"{field}.type", kind, ITEMS)
    for message in messages:
        if message.role == "assistant" and not message.tool_calls and message.content is msgspec.UNSET:
            message.content = ""
    return messages


def _add_message(
    messages: list[ChatMessage], item: Mapping[str, Any], field: str, warnings: Warnings | None, pictures: Pictures
) -> None:
    role, text = item.get("role"), _text(item.get("content"), f"{field}.content", warnings, pictures)
    if role not in ROLES:
        raise RequestError(f"{field}.role", role, "one of " + ", ".join(ROLES))
    if role == "assistant":
        _turn(messages, without_text=True).content = text
    elif role == "user":
        messages.append(ChatMessage(role="user", content=text))
    elif len(messages) == 1 and messages[0].role == "system":
        # Templates take one system message, in the first place.
        messages[0].content = f"{messages[0].content}\n\n{text}"
    else:
        messages.append(ChatMessage(role="system", content=text))


def _turn(messages: list[ChatMessage], without_text: bool = False) -> ChatMessage:
    """Return the model's turn that is being read; a new one if the last message is not the model's, or has a text and
    must not."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or (without_text and last.content is not msgspec.UNSET):
        last = ChatMessage(role="assistant")
        messages.append(last)
    return last


def _text(content: Any, field: str, warnings: Warnings | None, pictures: Pictures | None = None) -> str:
    """Return the texts of `content`, with marks for pictures. With `warnings`, a short text stands for another part
    that the model cannot read."""
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
        elif kind == "input_image" and pictures is not None and part.get("file_id") is None:
            texts.append(pictures.mark(picture_part(part, f"{field}[{index}]", warnings is None)))
        elif isinstance(kind, str) and warnings is not None:
            warnings.add(f"{field}[{index}]", LEFT_OUT)
            texts.append(placeholder(kind))
        else:
            raise RequestError(f"{field}[{index}].type", kind, "input_text or output_text: nothing else is read")
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name}", value, "a string")
    return value
