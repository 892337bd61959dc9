"""The bodies of OpenAI's POST routes, as structs, and the function that makes one of a JSON object.

Names are OpenAI's, and vLLM's where OpenAI has none. A field that would change the answer (`UNSUPPORTED`) is accepted
with its neutral value and refused with any other; a field that changes no answer (`IGNORED`) and an unknown one end in
the reply's `warnings`. Ranges are not here but in `headrace.protocol.bounds`. Knows no HTTP; `serve.apis.openai` is the
caller.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.protocol.parameters import OPENAI
from headrace.serve.call.adapters import AdapterScale
from headrace.serve.call.parsing import Body, Warnings, convert, takes_parameters


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@takes_parameters(OPENAI, but=("logprobs",))
class Sampled(Body, forbid_unknown_fields=True, kw_only=True):
    """The fields that both kinds of completion take. None (null in JSON) means that the field is absent."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    # true, or an object: see `protocol.params.Watermark`.
    watermark: bool | dict[str, Any] | None = None
    # See `text.beams`.
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    explain: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    verbose: bool | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    # The form of the answer.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_structural_tag: str | None = None
    guided_whitespace_pattern: str | None = None
    # llama-server's names for two fields above.
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    # llama-server's scales of adapters.
    lora: list[AdapterScale] | None = None
    # Labels for the caller's own records; they change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None


class ChatCompletionRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # A template in place of the model's, where the server trusts requests with templates.
    chat_template: str | None = None
    # A variable of templates that have a place for source texts.
    documents: list[dict[str, Any]] | None = None
    # Repeat the last message before the answer, if it is the assistant's.
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # OpenAI's older names for two fields above.
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    # Stop strings end the answer in its reasoning and its calls too, not in its content alone.
    stop_in_reasoning: bool | None = None


class TokenizeRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text, or messages to be put through the chat template first.

    The four fields from `content` on are llama-server's, whose reply has another shape.
    """

    model: str | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# Known fields that are not supported yet, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": (([],), "a request can not bring code; offline, SamplingParams takes functions"),
    "functions": (([],), "chats have it: /v1/chat/completions"),
    "function_call": (("none",), "chats have it: /v1/chat/completions"),
    "echo": ((False,), "the answer alone is returned; /v1/chat/completions and /v1/completions have it"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "suffix": (("",), "write it into the prompt, with the model's own marks for filling in"),
    "documents": (([],), "write them into the input, or into chat_template_kwargs if the template reads them"),
    "chat_template": ((), "start the server with --chat-template; /v1/chat/completions takes one where it is trusted"),
    "prompt_embeds": ((), "prompts are text or token ids"),
}

# Known fields that change no answer here: they end in `warnings` unless their value has no effect.
IGNORED: dict[str, tuple[tuple[Any, ...], str]] = {
    "prediction": ((), "a hint for speed that is not used"),
    "verbosity": ((), "the models served here have no such setting"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "completions are not stored; responses are"),
    "mm_processor_kwargs": (({},), "text models only"),
    "kv_transfer_params": ((), "no other engine to exchange the cache with"),
    "vllm_xargs": (({},), "arguments of vLLM's plugins"),
    "guided_decoding_backend": ((), "there is one, llguidance"),
    "include_metrics": ((False,), "timings come with every reply"),
    "web_search_options": ((), "this server searches nothing"),
    "logprob_token_ids": (([],), "logprobs tells of the likeliest tokens"),
    "return_tokens_as_token_ids": ((False,), "return_token_ids gives the ids beside the text"),
}

# The row of the bounds table for a number, where the names differ.
ROWS = {"top_logprobs": "logprobs"}
CHECKED_HERE = ("truncate_prompt_tokens", "priority", "timeout", "top_logprobs")
SIZES_CHECKED_HERE = ("request_id", "cache_salt")
LABELS = ("user", "safety_identifier", "prompt_cache_key")
IN_ANOTHER_FORM = frozenset(("logprobs", "structured_outputs"))
"""Parameters with another type than the engine's: logprobs differs between the two kinds of completion, and the form of
the answer has further fields."""

MAX_METADATA = 16

T = TypeVar("T", bound=Body)


def parse(kind: type[T], body: dict[str, Any]) -> T:
    """Return `body` as a `kind`. Raises `RequestError`, which names the field, its value and the allowed values."""
    warnings = Warnings()
    known = {name: value for name, value in body.items() if not _neutral(name, value, kind, warnings)}
    request = convert(kind, known, warnings=warnings)
    for name in CHECKED_HERE:
        value = getattr(request, name, None)
        if value is not None:
            bounds.check(ROWS.get(name, name), value, name)
    for name in SIZES_CHECKED_HERE:
        value = getattr(request, name, None)
        if value is not None:
            bounds.check(name, value)
    check_labels(request)
    return request


def check_labels(request: Body) -> None:
    """Raise `RequestError` for a label that is too long."""
    for name in LABELS:
        value = getattr(request, name, None)
        if value is not None:
            bounds.check("label", value, name)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise `RequestError` for labels that are too many or too long."""
    labels = metadata or {}
    if len(labels) > MAX_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in labels.items()):
        raise RequestError("metadata", len(labels), f"at most {MAX_METADATA} keys of 64 and values of 512 characters")


def _neutral(name: str, value: Any, kind: type[Body], warnings: Warnings) -> bool:
    """Return whether a field may be skipped; add to `warnings` if its value would have an effect elsewhere.

    Raises `RequestError` if skipping it would change the answer.
    """
    if not issubclass(kind, Sampled) or name in kind.__struct_fields__:
        return False
    if name in IGNORED:
        neutral, why = IGNORED[name]
        if value is not None and not _among(value, neutral):
            warnings.add(name, f"ignored: {why}")
        return True
    if name not in UNSUPPORTED:
        return False
    neutral, instead = UNSUPPORTED[name]
    if value is None or _among(value, neutral):
        return True
    raise UnsupportedError(name, value, instead)


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in neutral)
