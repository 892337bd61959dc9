"""The replies of the routes as structs, for the OpenAPI document alone: which fields there are, and of what type.

Replies are made as plain dicts; the tests hold them to these forms. Errors come last, one form for each API.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Reply(msgspec.Struct, kw_only=True):
    """What any reply may have."""

    # What of the request was not honoured, one sentence each; left out if there is nothing to tell.
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Timings(msgspec.Struct, kw_only=True):
    """Milliseconds and tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Choice(msgspec.Struct, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextChoice(Choice, kw_only=True):
    text: str


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Choice, kw_only=True):
    message: AssistantMessage


class Answered(Reply, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    usage: Usage
    timings: Timings


class Completion(Answered, kw_only=True):
    choices: list[TextChoice]


class ChatCompletion(Answered, kw_only=True):
    choices: list[ChatChoice]


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    type: str
    display_name: str
    created_at: str
    # What `headrace bench quality --save` left beside the weights.
    quality: dict[str, float | str] | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, kw_only=True):
    object: str
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


class TokenPiece(msgspec.Struct, kw_only=True):
    id: int
    # Bytes where the token is a part of a character.
    piece: str | list[int]


class Tokenized(Reply, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class Detokenized(Reply, kw_only=True):
    prompt: str
    content: str


class Status(msgspec.Struct, kw_only=True):
    status: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class Load(msgspec.Struct, kw_only=True):
    server_load: int


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(Reply, kw_only=True):
    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Reply, kw_only=True):
    input_tokens: int


class OllamaReply(Reply, kw_only=True):
    """Durations in nanoseconds. A model that was only loaded has none, and no counts."""

    model: str
    created_at: str
    done: bool
    done_reason: str
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class OllamaGenerated(OllamaReply, kw_only=True):
    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    context: list[int] | msgspec.UnsetType = msgspec.UNSET


class OllamaSaid(OllamaReply, kw_only=True):
    message: dict[str, Any]


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]
    expires_at: str | msgspec.UnsetType = msgspec.UNSET
    size_vram: int | msgspec.UnsetType = msgspec.UNSET
    context_length: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaShown(Reply, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbedded(Reply, kw_only=True):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int
    load_duration: int


class OllamaVector(Reply, kw_only=True):
    embedding: list[float]


class LlamaVector(msgspec.Struct, kw_only=True):
    index: int
    embedding: list[list[float]]


class OllamaPulled(Reply, kw_only=True):
    status: str


class LlamaResult(Reply, kw_only=True):
    """With `response_fields`, those of them that were asked for."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id_slot: int | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tokens: list[int] | msgspec.UnsetType = msgspec.UNSET
    stop: bool | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    tokens_predicted: int | msgspec.UnsetType = msgspec.UNSET
    tokens_evaluated: int | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    generation_settings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    has_new_line: bool | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: str | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class LlamaPrompt(Reply, kw_only=True):
    prompt: str


class LlamaProps(msgspec.Struct, kw_only=True):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class LlamaSlot(msgspec.Struct, kw_only=True):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class Vector(msgspec.Struct, kw_only=True):
    object: str
    index: int
    # base64 of float32 numbers where that was asked for.
    embedding: list[float] | str


class VectorUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedded(Reply, kw_only=True):
    object: str
    data: list[Vector]
    model: str
    usage: VectorUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str
    score: float


class Scores(Reply, kw_only=True):
    id: str
    object: str
    data: list[Score]
    model: str
    usage: VectorUsage


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Ranking(Reply, kw_only=True):
    id: str
    results: list[Ranked]
    model: str
    usage: VectorUsage


class Page(msgspec.Struct, kw_only=True):
    object: str
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool


class StoredFile(Reply, kw_only=True):
    """Sizes in bytes, times (here and below) in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str
    status: str


class StoredFiles(Page, kw_only=True):
    data: list[StoredFile]


class StoredBatch(Reply, kw_only=True):
    id: str
    object: str
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    metadata: dict[str, str] | None


class StoredBatches(Page, kw_only=True):
    data: list[StoredBatch]


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(Reply, kw_only=True):
    """`usage` and `timings` come when it has ended."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]
    seed: int
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class InputItems(Page, kw_only=True):
    data: list[dict[str, Any]]


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct, kw_only=True):
    """OpenAI's."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: str
    error: AnthropicErrorBody


class OllamaError(msgspec.Struct, kw_only=True):
    error: str


class LlamaErrorBody(msgspec.Struct, kw_only=True):
    code: int
    message: str
    type: str


class LlamaError(msgspec.Struct, kw_only=True):
    error: LlamaErrorBody
