"""The bodies of the POST routes, as structs, and how a JSON object becomes one: every field is known or refused.

Names are OpenAI's, and vLLM's for what OpenAI has not. A field that headrace knows of but can not honour yet is
accepted with its neutral value and refused with any other; an unknown field is refused by name. Ranges are not here
but in `headrace.bounds`. Knows no HTTP; `server.openai` is the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from headrace import bounds
from headrace.errors import RequestError
from headrace.sampling.params import SamplingParams


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of completion take. None, also given as null, means: not given."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    # Labels for the caller's own books; they change no answer.
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


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text, or messages to be put through the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# Known fields that are not honoured yet, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "echo": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "return_tokens_as_token_ids": (False,),
    "include_metrics": (False,),
    "prompt_embeds": (),
}

# Which row of the bounds table holds for a number, where the names differ.
ROWS = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
CHECKED_HERE = ("truncate_prompt_tokens", "priority", "max_completion_tokens", "top_logprobs")
SIZES_CHECKED_HERE = ("request_id", "cache_salt")
PASSED_ON = frozenset(SamplingParams.__struct_fields__) & frozenset(Sampled.__struct_fields__)

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}

T = TypeVar("T", bound=msgspec.Struct)


def parse(kind: type[T], body: dict[str, Any]) -> T:
    """`body` as a `kind`. Raises `RequestError` naming the field, its value and what is allowed."""
    body = {name: value for name, value in body.items() if not _neutral(name, value, kind)}
    # OpenAI's `best_of` picks among n drawn answers; as many drawn as given is no picking.
    if kind is CompletionRequest and "best_of" in body:
        best_of = body.pop("best_of")
        if best_of is not None and (isinstance(best_of, bool) or best_of != (body.get("n") or 1)):
            raise RequestError("best_of", best_of, "left out, or equal to n: headrace does not support it yet")
    try:
        # Keys of JSON objects are strings, those of logit_bias too.
        made = msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _mistake(str(error), body) from error
    except OverflowError as error:
        raise RequestError("body", "an integer too large for a double", "finite numbers") from error
    for name in CHECKED_HERE:
        value = getattr(made, name, None)
        if value is not None:
            bounds.check(ROWS.get(name, name), value, name)
    for name in SIZES_CHECKED_HERE:
        value = getattr(made, name, None)
        if value is not None:
            bounds.check(name, value)
    return made


def sampling_params(request: Sampled, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """The parameters of a request; what it does not give is taken from `defaults`, the model's own.

    `more` overrides both. Raises `RequestError`.
    """
    given = {name: getattr(request, name) for name in PASSED_ON if getattr(request, name) is not None}
    return SamplingParams(**{**defaults, **given, **more})


def _neutral(name: str, value: Any, kind: type[msgspec.Struct]) -> bool:
    """Whether a field that is not supported may be passed over. Raises `RequestError` if it asks for something."""
    if name not in UNSUPPORTED or not issubclass(kind, Sampled) or name in kind.__struct_fields__:
        return False
    neutral = UNSUPPORTED[name]
    if value is None or any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in neutral):
        return True
    allowed = " or ".join([msgspec.json.encode(x).decode() for x in neutral] + ["left out"])
    raise RequestError(name, value, f"{allowed}: headrace does not support it yet")


def _mistake(message: str, body: dict[str, Any]) -> RequestError:
    """msgspec's complaint, told as field, value and what is allowed."""
    unknown = re.search(r"unknown field `(.*?)`(?: - at `\$\.?(.*?)`)?$", message, re.DOTALL)
    if unknown:
        path = ".".join(part for part in (unknown[2], unknown[1]) if part)
        return RequestError(path, _at(body, path), "a field that headrace knows; this one is unknown", "unknown_field")
    missing = re.search(r"missing required field `(.*?)`", message)
    if missing:
        return RequestError(missing[1], None, "given")
    expected = re.search(r"Expected `(.*?)`", message)
    place = re.search(r"at `(?:key` in `)?\$\.?(.*?)`$", message)
    path = place[1] if place else "body"
    words = [_WORDS.get(word, word) for word in expected[1].split(" | ") if word != "null"] if expected else [message]
    return RequestError(path.replace("[...]", ""), _at(body, path), " or ".join(words))


def _at(body: Any, path: str) -> Any:
    """The value that a path of msgspec's leads to; `[...]` stands for any key or index and ends the walk."""
    for part in re.findall(r"[^.\[\]]+|\[\d+\]", path.split("[...]")[0]):
        if part.startswith("["):
            index = int(part[1:-1])
            if not isinstance(body, list) or index >= len(body):
                return None
            body = body[index]
        elif isinstance(body, dict) and part in body:
            body = body[part]
        else:
            return None
    return body
