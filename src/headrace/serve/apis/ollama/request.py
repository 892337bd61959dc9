"""The bodies of Ollama's requests, and the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.protocol.parameters import OLLAMA
from headrace.serve.call.parsing import Body, Warnings, convert, takes_parameters
from headrace.text.messages import ChatMessage, PastCall, check_role, first_new
from headrace.text.pictures.marks import PictureInput, Pictures

LOADING = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "num_thread", "num_keep",
)  # fmt: skip
"""Options that are set when a server starts, not by a request."""

T = TypeVar("T", bound=Body)


@takes_parameters(OLLAMA)
class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The options that shape an answer. Other known options end in warnings."""

    num_ctx: int | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None


class GenerationRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """The fields that chat and generate have in common."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = None


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


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
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
    keep_alive: float | str | None = None


class CopyRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/copy."""

    source: str
    destination: str


class CreateRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/create. `files`, `adapters`: digests of uploaded files by the names that they get."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    stream: bool | None = None
    license: str | list[str] | None = None
    adapters: dict[str, str] | None = None
    messages: list[Any] | None = None
    modelfile: str | None = None
    parameters: Options | None = None
    path: str | None = None
    quantize: str | None = None
    system: str | None = None
    template: str | None = None


class ShowRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show and /api/pull, DELETE /api/delete; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None


def read_options(kind: type[T], body: dict[str, Any], field: str, ignored: Mapping[str, str] | None = None) -> T:
    """Return a body whose `field` has options; options of `LOADING` end in warnings. For the rest see `convert`."""
    options, warnings = body.get(field), Warnings()
    if isinstance(options, dict):
        for name in options:
            if name in LOADING:
                warnings.add(f"{field}.{name}", "ignored: set when the server starts")
        body = body | {field: {name: value for name, value in options.items() if name not in LOADING}}
    return convert(kind, body, ignored, warnings)


def warn_of(options: Options, field: str, request: Body) -> None:
    """Add a warning for each option that has no effect in the engine."""
    if options.tfs_z not in (None, 1.0):
        request.warn(f"{field}.tfs_z", "ignored: Ollama itself dropped it")
    if options.penalize_newline is False:
        request.warn(f"{field}.penalize_newline", "ignored: penalties know no newline")


def messages_of(turns: Sequence[Message], pictures: Pictures) -> list[ChatMessage]:
    """Return a chat's turns as messages; their pictures stand before the text. Raises `RequestError`."""
    bounds.check("messages", turns)
    new = first_new([turn.role for turn in turns])
    messages: list[ChatMessage] = []
    for index, turn in enumerate(turns):
        field = f"messages[{index}]"
        message = _message_of(turn, field)
        if turn.images:
            is_new = index >= new and turn.role == "user"
            message.content = marks_of(turn.images, f"{field}.images", pictures, is_new) + (turn.content or "")
        messages.append(message)
    return messages


def marks_of(images: Sequence[Any], field: str, pictures: Pictures, is_new: bool) -> str:
    """Return the text that stands for pictures in base64. is_new: whether a model without pictures must refuse them.
    Raises `RequestError`."""
    texts = []
    for place, image in enumerate(images):
        if not isinstance(image, str):
            raise RequestError(f"{field}[{place}]", image, "a picture in base64")
        refusal = UnsupportedError(field, "images", "the model served here reads text") if is_new else None
        texts.append(pictures.mark(PictureInput(f"{field}[{place}]", image, "image", refusal)))
    return "".join(texts)


def _message_of(turn: Message, field: str) -> ChatMessage:
    calls = [
        PastCall.of(
            call.id or f"call_{index}",
            call.function.name,
            call.function.arguments,
            f"{field}.tool_calls[{index}].function.arguments",
        )
        for index, call in enumerate(turn.tool_calls or [])
    ]
    extra = {"name": turn.tool_name, "tool_call_id": turn.tool_call_id}
    return ChatMessage(
        role=check_role(turn.role, f"{field}.role"),
        content=turn.content or "",
        reasoning=turn.thinking or None,
        tool_calls=calls,
        extra={name: value for name, value in extra.items() if value},
    )
