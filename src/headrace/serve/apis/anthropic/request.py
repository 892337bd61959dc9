"""The bodies of Anthropic's requests, and the `ChatCall` that each becomes.

Fields of the API that headrace does not support are refused or listed in `warnings`. Called by the routes in `paths`;
knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from headrace.protocol import bounds
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import ANTHROPIC, spelling_of
from headrace.serve.apis.anthropic.blocks import readable
from headrace.serve.call.call import ChatCall, SamplingFields, spelled
from headrace.serve.call.parsing import Body, Warnings, convert, takes_parameters
from headrace.text.messages import ChatMessage, PastCall, first_new
from headrace.text.pictures.marks import PictureInput, Pictures
from headrace.text.tools.choice import ToolFields, ToolUse

IGNORED = {
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "the model runs where this server runs",
    "container": "there are no containers",
    "diagnostics": "usage tells what the cache had",
}
# The engine's fields, and the fields of this API that set them.
SPELLING = spelling_of(ANTHROPIC) | {
    "structured_outputs": "output_config",
    "reasoning_effort": "output_config.effort",
    "prompt": "messages",
}
TOOL_FIELDS = ToolFields("name", "description", "strict", "input_schema", "tool_choice.name")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    # A mark for a cache that caches on demand; headrace's caches every prompt.
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
    """POST /v1/messages/count_tokens. Anthropic requires `model`; callers of llama-server leave it out."""

    model: str | None = None
    messages: list[Message]
    # Images are refused. The second type makes `type` required in every block.
    system: str | list[TextBlock | ImageBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


@takes_parameters(ANTHROPIC, but=("thinking_token_budget",))
class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    model: str
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None


T = TypeVar("T", bound=CountTokensRequest)


def read(kind: type[T], body: dict[str, Any]) -> T:
    """Return a body as a `kind`. Raises `RequestError`."""
    warnings = Warnings()
    return convert(kind, readable(body, warnings), IGNORED, warnings)


def chat_call(request: CountTokensRequest) -> ChatCall:
    """Return the chat call of a request. Raises `RequestError`; may add to the request's warnings."""
    messages = [ChatMessage(role="system", content=_system(request.system))] if request.system else []
    pictures, new = Pictures(), first_new([turn.role for turn in request.messages])
    for index, turn in enumerate(request.messages):
        is_new = index >= new and turn.role == "user"
        messages += _messages(turn, f"messages[{index}]", request, pictures, is_new)
    sampling = SamplingFields()
    thinking, output = request.thinking, request.output_config
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise RequestError("thinking.budget_tokens", None, "given with type enabled")
        sampling.thinking_token_budget = thinking.budget_tokens
    form = effort = None
    if output is not None and output.format is not None:
        with spelled(SPELLING):
            form = StructuredOutputs(json=output.format.schema)
    if output is not None and output.effort is not None:
        effort = output.effort
    if isinstance(request, MessagesRequest):
        sampling = SamplingFields.of(request, ANTHROPIC).over(sampling)
        if request.metadata is not None and request.metadata.user_id is not None:
            bounds.check("label", request.metadata.user_id, "metadata.user_id")
    return ChatCall(
        model=request.model,
        messages=messages,
        pictures=pictures,
        tools=_tool_use(request),
        sampling=sampling,
        form=form,
        reasoning_effort=effort,
        thinks=None if thinking is None else thinking.type != "disabled",
        # A prefill: the client has begun the answer, which goes on from there.
        continue_final_message=bool(request.messages) and request.messages[-1].role == "assistant",
        stream=isinstance(request, MessagesRequest) and bool(request.stream),
        cuts_max_tokens=True,
        warnings=request.warnings,
        spelling=SPELLING,
    )


def _messages(
    turn: Message, field: str, request: CountTokensRequest, pictures: Pictures, is_new: bool
) -> list[ChatMessage]:
    """Return one turn as messages: to templates, results of tools are messages of their own. is_new: whether a model
    without pictures must refuse those of the turn."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    messages: list[ChatMessage] = []
    texts: list[str] = []
    calls: list[PastCall] = []
    reasoning = ""
    for index, block in enumerate(turn.content):
        where = f"{field}.content[{index}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if turn.role != "user":
                raise RequestError(f"{where}.type", "tool_result", "in a message of the user's")
            extra = {"tool_call_id": block.tool_use_id}
            messages.append(ChatMessage(role="tool", content=_result(block, where, pictures), extra=extra))
        elif isinstance(block, ImageBlock) and turn.role == "user":
            texts.append(pictures.mark(_picture(block, where, is_new)))
        elif isinstance(block, ImageBlock | DocumentBlock):
            raise _no_text(where, block)
        elif turn.role != "assistant":
            raise RequestError(f"{where}.type", _tag(block), "in a message of the assistant's")
        elif isinstance(block, ToolUseBlock):
            calls.append(PastCall.of(block.id, block.name, block.input, f"{where}.input"))
        elif isinstance(block, ThinkingBlock):
            reasoning += block.thinking
        else:
            request.warn(where, "ignored: redacted thinking of another server can not be read here")
    if not texts and not calls and not reasoning:
        if not messages and turn.role == "assistant" and turn is request.messages[-1]:
            raise RequestError(f"{field}.content", [], "at least one block that can be read")
        return messages or [ChatMessage(role=turn.role, content="")]
    content = _text(texts) if texts else None
    return [
        *messages,
        ChatMessage(role=turn.role, content=content, reasoning=reasoning or None, tool_calls=calls),
    ]


def _text(texts: list[str]) -> str | list[str]:
    """Return one text, or several, which the model's template joins."""
    return texts[0] if len(texts) == 1 else texts


def _system(content: str | list[TextBlock | ImageBlock]) -> str:
    """Return the system prompt as one text: a template that takes lists would write several texts differently."""
    return content if isinstance(content, str) else "\n".join(_texts(content, "system"))


def _picture(block: ImageBlock, field: str, is_new: bool) -> PictureInput:
    """Return the picture of a block. Raises `RequestError`."""
    source = block.source
    kind, name = source.get("type"), "url" if source.get("type") == "url" else "data"
    if kind not in ("base64", "url"):
        raise RequestError(f"{field}.source.type", kind, "base64 or url: no files are kept here")
    if not isinstance(source.get(name), str):
        raise RequestError(f"{field}.source.{name}", source.get(name), "a string")
    refusal = _no_text(field, block) if is_new else None
    return PictureInput(f"{field}.source.{name}", source[name], "image_url" if kind == "url" else "image", refusal)


def _result(block: ToolResultBlock, field: str, pictures: Pictures) -> str | list[str]:
    """Return the result of a tool. A failure is put in words, for chat templates have no mark for it."""
    content = block.content or ""
    failed = "Error: " if block.is_error else ""
    if isinstance(content, str):
        return failed + content
    texts = _texts(content, f"{field}.content", pictures)
    return [failed, *texts] if failed else texts


def _texts(blocks: Sequence[Block], field: str, pictures: Pictures | None = None) -> list[str]:
    """Return the texts of blocks that must all be texts, or pictures for `pictures`. Raises `RequestError`."""
    texts = []
    for index, block in enumerate(blocks):
        if isinstance(block, ImageBlock) and pictures is not None:
            texts.append(pictures.mark(_picture(block, f"{field}[{index}]", False)))
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            raise _no_text(f"{field}[{index}]", block)
    return texts


def _tag(block: msgspec.Struct) -> str:
    return str(block.__struct_config__.tag)


def _no_text(field: str, block: msgspec.Struct) -> RequestError:
    return RequestError(f"{field}.type", _tag(block), "text: the models served here read nothing else")


def _tool_use(request: CountTokensRequest) -> ToolUse:
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])]
    wish, choice, parallel = request.tool_choice, None, True
    if wish is not None:
        if wish.type == "tool" and wish.name is None:
            raise RequestError("tool_choice.name", None, "given with type tool")
        named = {"type": "function", "function": {"name": wish.name}}
        choice = named if wish.type == "tool" else TOOL_CHOICES[wish.type]
        parallel = not wish.disable_parallel_tool_use
    return ToolUse.of(tools, choice, parallel, TOOL_FIELDS)


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{field}.type", tool.type, "custom or left out, or one of Anthropic's own")
    if tool.input_schema is None:
        raise RequestError(f"{field}.input_schema", None, "given")
    function = {
        "name": tool.name, "parameters": tool.input_schema, "description": tool.description, "strict": tool.strict
    }  # fmt: skip
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def marks_cache(request: CountTokensRequest) -> bool:
    """Return whether any part of the request has `cache_control`."""
    blocks: list[Any] = [request, *(request.tools or [])]
    blocks += request.system if isinstance(request.system, list) else []
    for message in request.messages:
        blocks += message.content if isinstance(message.content, list) else []
    return any(block.cache_control is not None for block in blocks)
