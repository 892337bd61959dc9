"""The replies of Ollama's API: answers as lines of JSON or as one object, and the descriptions of the models."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.engine.generation import off_loop, width
from headrace.protocol.errors import ContextLengthError
from headrace.serve.apis.ollama.request import GenerationRequest
from headrace.serve.call.call import Answer, arguments_object
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import ChatTokenLogprob, chat_logprobs
from headrace.serve.errors import Api
from headrace.serve.routing import Readable, large_event
from headrace.text.outputs import Content, Reasoning, RequestState, TextDelta

NDJSON = "application/x-ndjson"


def line(body: msgspec.Struct) -> bytes:
    """Return one line of a stream."""
    return msgspec.json.encode(body) + b"\n"


class OllamaError(msgspec.Struct, kw_only=True):
    error: str


def _overflow(error: ContextLengthError) -> str:
    """Return Ollama's own words, and then ours."""
    return f"the input length exceeds the context length. {error}"


API = Api(OllamaError, lambda status, body: OllamaError(error=body.message), line, ("/api/",), _overflow, b"")


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
    """POST /api/chat, and the last line of its stream. Durations in nanoseconds; a reply about a model that was only
    loaded has no durations and no counts."""

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
    """The reply to a request that only loads the model, or unloads it. With `message` it fits the form of `ChatReply`,
    with `response` the form of `GenerateReply`."""

    model: str
    created_at: str
    message: ReplyMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    done: Literal[True] = True
    done_reason: Literal["load", "unload"] = "load"
    warnings: WarningLines = UNSET


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model as a list shows it. Only a loaded model has the last three fields."""

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
    system: str | UnsetType = UNSET
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


class OllamaAnswer(Readable):
    """An answer as Ollama's.

    Args:
        chat: /api/chat has a message, /api/generate a response.
        ids: whether to return the token ids of prompt and answer, as the `context` of a next call.
    """

    answer: Answer
    media_type = NDJSON

    def __init__(self, answer: Answer, request: GenerationRequest, chat: bool, ids: bool) -> None:
        # Ollama's API streams unless a request has "stream": false.
        super().__init__(answer, request.stream is not False)
        self._request = request
        self._chat = chat
        self._ids = ids
        self._state = answer.generation.states[0]
        self._num_calls = 0

    async def whole(self) -> ChatReply | GenerateReply:
        await self.answer.collect()
        message = self.answer.message(0)
        calls, warnings = self._whole_calls(), self.answer.call.warnings.reply()

        def build() -> ChatReply | GenerateReply:
            whole = self._reply(message.content, message.reasoning, calls, warnings)
            whole.logprobs = self._logprobs(self._state)
            return whole

        return await off_loop(self.answer.size, build)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield lines of JSON, the last one with "done": true. Raises the engine's errors."""
        warnings = self.answer.call.warnings.reply()
        async for _, piece, parts in self.answer.parts():
            content = "".join(part.gap + part.text for part in parts if isinstance(part, Content))
            thinking = "".join(part.gap + part.text for part in parts if isinstance(part, Reasoning))
            wide = len(piece.logprobs) * width(piece.logprobs)
            calls, logprobs = self._whole_calls(), await off_loop(wide, functools.partial(self._logprobs, piece))
            if content or thinking or calls or logprobs:
                chunk = self._chunk(content, thinking, calls)
                chunk.logprobs, chunk.warnings = logprobs, warnings
                yield await large_event(chunk, wide, b"", b"\n")
                warnings = UNSET
        yield line(self._reply("", "", [], warnings))

    def _chunk(self, content: str, thinking: str, calls: list[WholeCall]) -> ChatChunk | GenerateChunk:
        if self._chat:
            message = _message(content, thinking, calls)
            return ChatChunk(model=self._request.model, created_at=now(), message=message, done=False)
        return GenerateChunk(
            model=self._request.model, created_at=now(), response=content, thinking=thinking or UNSET, done=False
        )

    def _whole_calls(self) -> list[WholeCall]:
        """Return the tool calls that have become whole since the last call of this method: all but the last tool call,
        until the answer has ended. Ollama sends each at once, with its arguments as an object."""
        calls, begin = self.answer.message(0).calls, self._num_calls
        self._num_calls = len(calls) if self._state.finish is not None else max(len(calls) - 1, 0)
        return [
            WholeCall(
                id=call["id"],
                function=CallFunction(name=call["name"], arguments=arguments_object(call["arguments"]), index=index),
            )
            for index, call in enumerate(calls[begin : self._num_calls], begin)
        ]

    def _logprobs(self, source: RequestState | TextDelta) -> list[ChatTokenLogprob] | UnsetType:
        if not self._request.logprobs:
            return UNSET
        return chat_logprobs(self.answer.tokenizer, source.logprobs) or UNSET

    def _reply(
        self, content: str, thinking: str, calls: list[WholeCall], warnings: WarningLines
    ) -> ChatReply | GenerateReply:
        """Return the whole reply, or the last line of a stream."""
        state, model = self._state, self._request.model
        reason = state.finish.reason if state.finish is not None else None
        done: ChatReply | GenerateReply
        if self._chat:
            message = _message(content, thinking, calls)
            done = ChatReply(model=model, created_at=now(), message=message, done=True, done_reason=reason)
        else:
            done = GenerateReply(
                model=model,
                created_at=now(),
                response=content,
                thinking=thinking or UNSET,
                done=True,
                done_reason=reason,
                context=[*state.request.prompt_token_ids, *state.token_ids] if self._ids else UNSET,
            )
        times = state.metrics
        done.warnings = warnings
        done.total_duration = _ns(None if times.finished_time is None else times.finished_time - times.arrival_time)
        done.load_duration = 0
        done.prompt_eval_count = len(state.request.prompt_token_ids)
        done.prompt_eval_duration = _ns(times.prefill_time)
        done.eval_count = len(state.token_ids)
        done.eval_duration = _ns(times.decode_time)
        return done


def _message(content: str, thinking: str, calls: list[WholeCall]) -> ReplyMessage:
    return ReplyMessage(content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET)


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
