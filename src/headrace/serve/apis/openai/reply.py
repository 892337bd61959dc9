"""The replies of OpenAI's API as structs, and the functions that build their parts from `RequestState`s.

Whole replies and chunks of a stream are built from the same parts, so that the two agree; the OpenAPI document is made
from the same structs. A field whose type has `UnsetType` is left out of the JSON where it is `UNSET`. Called by the
modules of its folder. Knows no HTTP and no engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.protocol.step import Request, TokenLogprob
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import ChatTokenLogprob, PromptProgress, Timings, Usage, clamp, token_text
from headrace.text.outputs import RequestState
from headrace.text.tokenizer import TokenBytes, Tokenizer


class BeamSearchMemory(msgspec.Struct, kw_only=True):
    """The most KV blocks that the beams held at once: as they shared them, and without sharing."""

    num_blocks: int
    num_blocks_unshared: int


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """The log-probabilities of each token; `text_offset` is its place in the text, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def extend(self, more: CompletionLogprobs) -> None:
        """Append the log-probabilities of the tokens that follow."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(more, name))


class PromptLogprob(msgspec.Struct, kw_only=True, gc=False):
    logprob: float
    rank: int | None
    decoded_token: str | None


Explanations = list[Any] | UnsetType
"""With `explain`: where the time of each answer went, in the form of `insight.explain.Explanation`."""

PromptLogprobs = list[dict[str, PromptLogprob] | None] | None
"""vLLM's `prompt_logprobs`: for each token of the prompt, ids to entries; None for the first."""


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function call. In a stream, only its first part has a name."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomCall(msgspec.Struct, kw_only=True):
    """The call of a custom tool, which takes a text."""

    name: str | UnsetType = UNSET
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call; `type` determines which of the last two fields it has."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ToolCallPart(msgspec.Struct, kw_only=True):
    """A part of a tool call in a stream. The first part has the call's id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning` is vLLM's other name for `reasoning_content`. `function_call`: the call, where the request has
    `functions`."""

    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """A delta of a stream. The first has the role and no content, the last is empty."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    """One answer of a reply. Each kind has another name for `body` in the JSON."""

    index: int
    body: Any
    logprobs: Any
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    warnings: WarningLines = UNSET
    token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    beam_score: float | UnsetType = UNSET


class CompletionChunkChoice(Choice, kw_only=True):
    """The first chunk of an answer may describe the prompt alone: then it has no stop reason and no seed."""

    body: str = msgspec.field(name="text")
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(CompletionChunkChoice, kw_only=True):
    stop_reason: str | int | None
    seed: int


class ChatChunkChoice(Choice, kw_only=True):
    """The first chunk of an answer has its role alone: then it has no stop reason and no seed."""

    body: ChatDelta = msgspec.field(name="delta")
    logprobs: ChatLogprobs | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    body: ChatMessage = msgspec.field(name="message")
    logprobs: ChatLogprobs | None
    stop_reason: str | int | None
    seed: int


class Verbose(msgspec.Struct, kw_only=True):
    """The further field of llama-server's `verbose`: the text that the model got."""

    prompt: str


class Head(msgspec.Struct, kw_only=True):
    """The first fields of every reply. `created` in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int


class Completion(Head, kw_only=True):
    """POST /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings
    explain: Explanations = UNSET
    verbose: Verbose | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    beam_search: BeamSearchMemory | UnsetType = UNSET
    warnings: WarningLines = UNSET


class CompletionChunk(Head, kw_only=True):
    """One event of /v1/completions. The last one has no choice where `usage` was requested."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
    warnings: WarningLines = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    explain: Explanations = UNSET
    verbose: Verbose | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ChatCompletion(Head, kw_only=True):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    explain: Explanations = UNSET
    verbose: Verbose | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    beam_search: BeamSearchMemory | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: WarningLines = UNSET


class ChatCompletionChunk(Head, kw_only=True):
    """One event of /v1/chat/completions. The last one has no choice where `usage` was requested."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    warnings: WarningLines = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    explain: Explanations = UNSET
    verbose: Verbose | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ModelCard(msgspec.Struct, kw_only=True):
    """An adapter's `parent` is its model. `type`, `display_name` and `created_at` are Anthropic's, `aliases` (all
    names, if there are several) llama-server's; `quality` is the report that `headrace bench quality --save` wrote
    next to the weights, `activations` the type of the numbers that quantised weights are multiplied with (int8, 16bit,
    mixed, fp8), `tags` the value of --tags."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["headrace"] = "headrace"
    root: str
    parent: str | None = None
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    aliases: list[str] | UnsetType = UNSET
    activations: str | UnsetType = UNSET
    quality: dict[str, float | str] | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """The last three are for Anthropic's clients, which turn pages."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Detokenized(msgspec.Struct, kw_only=True):
    """`content` is llama-server's name for `prompt`."""

    prompt: str
    content: str
    warnings: WarningLines = UNSET


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool


class Page(msgspec.Struct, kw_only=True):
    """One page of a list. The ids are None where it is empty."""

    object: Literal["list"] = "list"
    data: list[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None


def beam_search_memory(groups: Sequence[Sequence[RequestState]]) -> BeamSearchMemory | UnsetType:
    """Sum the KV blocks of the searches over the prompts; UNSET if there was no search."""
    outputs = [group[0].beams for group in groups if group[0].beams is not None]
    if not outputs:
        return UNSET
    return BeamSearchMemory(
        num_blocks=sum(output.num_blocks for output in outputs),
        num_blocks_unshared=sum(output.num_blocks_unshared for output in outputs),
    )


class CompletionLogprobsBuilder:
    """Builds `choices[].logprobs` of a text completion, piece by piece.

    It tracks the place in the text, in characters: a token that is not in the text has length 0, and a token that is
    part of a character counts nothing until the character is whole.

    Args:
        num_top: alternatives of each token.
        echoed: the prompt as the reply's text begins with it, or None if it does not: then `add` receives generated
            tokens alone.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, request: Request, echoed: str | None) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._echoed = echoed or ""
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        if tokenizer is not None:
            params, before = request.params, request.prompt_token_ids if echoed is None else []
            self._reader = TokenBytes(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
            for token_id in before[-4:]:
                self._utf8.decode(self._reader.read(token_id))
            self._reader.first = self._reader.first and not before

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens; None is the entry of the prompt's first token, before which
        there is no token."""
        tokens = [token_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for token_id, token in zip(token_ids, tokens, strict=True):
            offsets.append(self._offset)
            self._offset += self._width(token_id, token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if entry is None else clamp(entry.logprob) for entry in entries],
            top_logprobs=[None if entry is None else self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _width(self, token_id: int, token: str) -> int:
        if self._tokenizer is None:
            return len(token)
        data = self._reader.read(token_id)
        if not data and self._echoed.startswith(token, self._offset):
            return len(token)  # a special token that the client has spelt in the prompt
        return len(self._utf8.decode(data))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # OpenAI's shape is keyed by text, so of two tokens with the same text the likelier one stays.
        top: dict[str, float] = {}
        alternatives = [] if self._num_top == 0 else entry.top
        for token_id, logprob in [*alternatives, (entry.token_id, entry.logprob)]:
            top.setdefault(token_text(self._tokenizer, token_id), clamp(logprob))
        return top


def prompt_logprobs(state: RequestState) -> PromptLogprobs:
    """Return `prompt_logprobs` of an answer; None if they were not computed."""
    entries = state.prompt_entries()
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(logprob=clamp(x.logprob), rank=x.rank, decoded_token=x.decoded_token)
            for token_id, x in entry.items()
        }
        for entry in entries
    ]
