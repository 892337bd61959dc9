"""The replies of Ollama's API: answers as lines of JSON or as one object, and what describes the model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.serve.apis.ollama.errors import error_body
from headrace.serve.apis.ollama.request import GenerationRequest
from headrace.serve.call.answers import Answer, arguments_object
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import ChatTokenLogprob, chat_logprobs
from headrace.text.outputs import Content, MessagePart, Reasoning, ToolCall

NDJSON = "application/x-ndjson"


class CallFunction(msgspec.Struct, kw_only=True):
    name: str | None
    arguments: dict[str, Any]
    index: int


class WholeCall(msgspec.Struct, kw_only=True):
    id: str
    function: CallFunction


class ReplyMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[WholeCall] | UnsetType = UNSET


class LineHead(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    warnings: WarningLines = UNSET


class ChatChunk(LineHead, kw_only=True):
    message: ReplyMessage
    done: bool
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class GenerateChunk(LineHead, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    done: bool
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class ChatReply(LineHead, kw_only=True):
    """POST /api/chat, and the last line of its stream. Durations in nanoseconds; a model that was only loaded has none,
    and no counts."""

    message: ReplyMessage
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: str | None
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class GenerateReply(LineHead, kw_only=True):
    """POST /api/generate, and the last line of its stream; see `ChatReply`."""

    response: str
    thinking: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: str | None
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class LoadReply(msgspec.Struct, kw_only=True):
    """The reply to a request that only loads the model. It fits the form of `ChatReply` or of `GenerateReply`, by which
    of `message` and `response` it has."""

    model: str
    created_at: str
    message: ReplyMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    done: Literal[True] = True
    done_reason: Literal["load"] = "load"
    warnings: WarningLines = UNSET


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """The last three are those of a model that is loaded."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class ShowReply(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    warnings: WarningLines = UNSET


class EmbedReply(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int
    load_duration: int
    warnings: WarningLines = UNSET


class EmbeddingReply(msgspec.Struct, kw_only=True):
    embedding: list[float]
    warnings: WarningLines = UNSET


class PullReply(msgspec.Struct, kw_only=True):
    status: Literal["success"] = "success"
    warnings: WarningLines = UNSET


class Lines:
    """An answer as Ollama's. Read it once, by `whole` or by `events`.

    Args:
        chat: /api/chat has a message, /api/generate a response.
        ids: whether to return the token ids of prompt and answer, as the `context` of a next call.
    """

    def __init__(self, answer: Answer, request: GenerationRequest, chat: bool, ids: bool) -> None:
        self._answer = answer
        self._request = request
        self._chat = chat
        self._ids = ids
        self._state = answer.generation.states[0]
        self._num_sent = 0
        self.id = answer.id
        # Ollama's API streams unless a request says otherwise.
        self.stream = request.stream is not False

    def close(self) -> None:
        self._answer.close()

    async def whole(self) -> ChatReply | GenerateReply:
        """Return one object. Raises the engine's errors."""
        content = thinking = ""
        calls = Calls()
        async for _, parts in self._answer.parts():
            content += _content(parts)
            thinking += _thinking(parts)
            calls.take(parts)
        return self._reply(
            self._answer.call.warnings.reply(), content, thinking, calls.finished(True), self._logprobs()
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield lines of JSON, the last one with "done": true. Raises the engine's errors."""
        calls = Calls()
        warnings = self._answer.call.warnings.reply()
        async for _, parts in self._answer.parts():
            content, thinking = _content(parts), _thinking(parts)
            calls.take(parts)
            whole_calls = calls.finished(self._state.finish is not None)
            logprobs = self._logprobs()
            if content or thinking or whole_calls or logprobs:
                head = {"model": self._request.model, "created_at": now(), "warnings": warnings}
                fields = head | self._message(content, thinking, whole_calls)
                chunk_type = ChatChunk if self._chat else GenerateChunk
                yield line(chunk_type(**fields, done=False, logprobs=logprobs))
                warnings = UNSET
        yield line(self._reply(warnings, "", "", [], UNSET))

    def _message(self, content: str, thinking: str, calls: list[WholeCall]) -> dict[str, Any]:
        if not self._chat:
            return {"response": content, "thinking": thinking or UNSET}
        return {"message": ReplyMessage(content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET)}

    def _logprobs(self) -> list[ChatTokenLogprob] | UnsetType:
        """Those of the tokens that came since the last call."""
        if not self._request.logprobs:
            return UNSET
        entries = self._state.logprobs[self._num_sent :]
        self._num_sent = len(self._state.logprobs)
        return chat_logprobs(self._answer.tokenizer, entries) or UNSET

    def _reply(
        self,
        warnings: WarningLines,
        content: str,
        thinking: str,
        calls: list[WholeCall],
        logprobs: list[ChatTokenLogprob] | UnsetType,
    ) -> ChatReply | GenerateReply:
        state, times = self._state, self._state.metrics
        total = None if times.finished_time is None else times.finished_time - times.arrival_time
        fields: dict[str, Any] = {
            "model": self._request.model,
            "created_at": now(),
            "warnings": warnings,
            **self._message(content, thinking, calls),
            "logprobs": logprobs,
            "done": True,
            "done_reason": state.finish.reason if state.finish is not None else None,
            "total_duration": _ns(total),
            "load_duration": 0,
            "prompt_eval_count": len(state.request.prompt_token_ids),
            "prompt_eval_duration": _ns(times.prefill_time),
            "eval_count": len(state.token_ids),
            "eval_duration": _ns(times.decode_time),
        }
        if self._chat:
            return ChatReply(**fields)
        context = [*state.request.prompt_token_ids, *state.token_ids] if self._ids else UNSET
        return GenerateReply(**fields, context=context)


class Calls:
    """Tool calls on their way; Ollama sends each at once and whole, with its arguments as an object."""

    def __init__(self) -> None:
        self._open: list[ToolCall] = []

    def take(self, parts: list[MessagePart]) -> None:
        """Take in the calls among further parts."""
        for part in parts:
            if not isinstance(part, ToolCall):
                continue
            if part.name is not None:
                self._open.append(part)
            else:
                last = self._open[-1]
                self._open[-1] = msgspec.structs.replace(last, arguments=last.arguments + part.arguments)

    def finished(self, ended: bool) -> list[WholeCall]:
        """Return the calls that are whole now and were not before: all but the last one, until the answer has ended."""
        num_ready = len(self._open) if ended else max(len(self._open) - 1, 0)
        ready, self._open = self._open[:num_ready], self._open[num_ready:]
        return [
            WholeCall(
                id=call.id,
                function=CallFunction(name=call.name, arguments=arguments_object(call.arguments), index=call.index),
            )
            for call in ready
        ]


def _content(parts: list[MessagePart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def _thinking(parts: list[MessagePart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(body: msgspec.Struct) -> bytes:
    """Return one line of a stream."""
    return msgspec.json.encode(body) + b"\n"


def failure(error: BaseException) -> bytes:
    """Return the line that ends a broken stream."""
    return line(error_body(error)[1])
