"""`SamplingParams`: how the tokens of a request are chosen. Names and defaults are vLLM's, or llama-server's where vLLM
has none. Ranges, meanings and the names in each API are in `headrace.protocol.parameters`.

Frozen, checked against that table at construction, and sent as it is from the server to the engine. Knows no tensors,
no text beyond the strings that the front end turns into token ids, no model. The engine checks token ids against the
model's width, which is not known here.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.constraints import StructuredOutputs, constraint_of
from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import MAX_INT32, PARAMETERS

NUMBERS = tuple(row.name for row in PARAMETERS.values() if row.kind in ("int", "float"))
BOOLS = tuple(row.name for row in PARAMETERS.values() if row.kind == "bool")

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "temperature",
    "min_p",
    "top_k",
    "typical_p",
    "top_p",
    "xtc",
    "adaptive_p",
)
"""The order of vLLM V1 (penalties, temperature, min_p, top_k, top_p), with the others in between.
adaptive_p runs last, wherever it is listed: it draws from the tokens that the others keep."""

# llama-server's spelling.
ALIASES = {"typ_p": "typical_p"}


class Watermark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The mark of Kirchenbauer et al. 2023 (arXiv 2301.10226, algorithm 2): the token before and `hashing_key` make a
    share `gamma` of the vocabulary green, and green logits get `delta` more. With `gamma` and `hashing_key` such a
    text can be recognised: `headrace.sampling.watermark.detect`.

    Raises `RequestError` naming the field, the value and the bound.
    """

    gamma: float = 0.25
    delta: float = 2.0
    hashing_key: int = 15485863

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            bounds.check(f"watermark_{name}", getattr(self, name), f"watermark.{name}")


def watermark_of(value: Watermark | Mapping[str, Any] | bool) -> Watermark | None:
    """Return a `Watermark` for true (the defaults) or for a dict of its fields, None for false. Raises `RequestError`
    for anything else."""
    if isinstance(value, Watermark):
        return value
    if isinstance(value, bool):
        return Watermark() if value else None
    if not isinstance(value, Mapping):
        raise RequestError("watermark", value, "true, false, a Watermark, or an object of its fields")
    return bounds.struct_of(Watermark, value, "watermark")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request.

    Without `speculation` nothing is drafted for the request; while verification is coupled, that changes its speed
    alone. The front end fills in the fields from `bad_words_token_ids` on from texts, with its tokenizer; a caller
    without a tokenizer may set them. `thinking_token_ids` are the ids that begin and that end the reasoning.
    `logits_processors` are functions (prompt token ids, token ids so far, logits) -> logits, float32 [V], pure, for
    engines in the caller's own process.

    Raises `RequestError` naming the field, the value and the bound.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    post_sampling_probs: bool = False
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] | None = None
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    no_repeat_ngram_size: int = 0
    thinking_token_budget: int | None = None
    trace_decode_token_ids: list[int] | None = None
    watermark: Watermark | bool | None = None
    samplers: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: bool = True
    bad_words_token_ids: list[list[int]] | None = None
    dry_sequence_breaker_ids: list[int] | None = None
    thinking_token_ids: tuple[list[int], list[int]] | None = None
    logits_processors: list[Any] | None = None

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return msgspec.structs.replace(self)

    def __post_init__(self) -> None:
        optional = _optional_fields()
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None or name not in optional:
                bounds.check(name, value)
        for name in BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "true or false")
        if self.structured_outputs is not None:
            msgspec.structs.force_setattr(self, "structured_outputs", constraint_of(self.structured_outputs))
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        self._check_texts("stop", "stop_string")
        self._check_texts("bad_words", "bad_word")
        self._check_texts("dry_sequence_breakers", "dry_sequence_breaker")
        for name in ("stop_token_ids", "allowed_token_ids", "dry_sequence_breaker_ids", "trace_decode_token_ids"):
            self._check_ids(name)
        for token_ids in self.bad_words_token_ids or ():
            if not token_ids:
                raise RequestError("bad_words_token_ids", token_ids, "lists of at least one token id")
            _check_each("bad_words", token_ids)
        for token_ids in self.thinking_token_ids or ():
            if not token_ids:
                raise RequestError("thinking_token_ids", token_ids, "two lists of at least one token id")
            _check_each("thinking_token_ids", token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids", [], "left out, or at least one token id")
        if self.logit_bias:
            if not isinstance(self.logit_bias, dict):
                raise RequestError("logit_bias", self.logit_bias, "a dict of token ids to numbers")
            bounds.check("logit_bias", self.logit_bias)
            for token_id, value in self.logit_bias.items():
                bounds.check("token_id", token_id, "logit_bias")
                bounds.check("logit_bias_value", value, "logit_bias")
        self._check_samplers()
        self._check_trace()
        if self.watermark is not None:
            msgspec.structs.force_setattr(self, "watermark", watermark_of(self.watermark))
        if self.logits_processors and not all(callable(each) for each in self.logits_processors):
            raise RequestError("logits_processors", "something else", "a list of functions")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError("best_of", self.best_of, f"at least n ({self.n})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 and self.uses("temperature")

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers that run, in their order."""
        return DEFAULT_SAMPLERS if self.samplers is None else tuple(ALIASES.get(x, x) for x in self.samplers)

    def uses(self, sampler: str) -> bool:
        return self.samplers is None or sampler in self.order

    @property
    def penalizes(self) -> bool:
        """Whether repetition, frequency or presence of tokens changes logits."""
        has_penalty = self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return has_penalty and self.repeat_last_n != 0 and self.uses("penalties")

    @property
    def dries(self) -> bool:
        """Whether DRY changes logits."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0 and self.uses("dry")

    @property
    def adapts(self) -> bool:
        """Whether adaptive-p draws the token. Mirostat replaces it, as it replaces all filters."""
        return self.adaptive_target >= 0.0 and not self.mirostat and self.uses("adaptive_p")

    @property
    def steers(self) -> bool:
        """Whether the sampler has a state on which the next token depends."""
        return bool(self.mirostat) or self.adapts

    @property
    def needs_history(self) -> bool:
        """Whether the sampler needs the tokens so far."""
        return (
            self.penalizes
            or self.dries
            or self.no_repeat_ngram_size > 0
            or self.thinking_token_budget is not None
            or self.structured_outputs is not None
            or self.watermark is not None
            or bool(self.logits_processors)
            or any(len(token_ids) > 1 for token_ids in self.bad_words_token_ids or ())
        )

    def _check_texts(self, name: str, row: str) -> None:
        texts = getattr(self, name)
        if not texts:
            return
        if not isinstance(texts, list):
            raise RequestError(name, texts, "a list of strings")
        bounds.check(name, texts)
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(name, text, "a string, or a list of strings")
            bounds.check(row, text, name)

    def _check_ids(self, name: str) -> None:
        token_ids = getattr(self, name)
        if not token_ids:
            return
        if name in bounds.BOUNDS:
            bounds.check(name, token_ids)
        _check_each(name, token_ids)

    def _check_samplers(self) -> None:
        if self.samplers is None:
            return
        if not isinstance(self.samplers, list):
            raise RequestError("samplers", self.samplers, "a list of names")
        bounds.check("samplers", self.samplers)
        for place, name in enumerate(self.order):
            if name not in DEFAULT_SAMPLERS:
                raise RequestError("samplers", name, f"one of {', '.join(DEFAULT_SAMPLERS)}")
            if name in self.order[:place]:
                raise RequestError("samplers", name, "named once")

    def _check_trace(self) -> None:
        trace = self.trace_decode_token_ids
        if trace is None:
            return
        if not trace:
            raise RequestError("trace_decode_token_ids", trace, "left out, or at least one token id")
        value = f"{len(trace)} token ids"
        if self.structured_outputs is not None:
            raise RequestError("trace_decode_token_ids", value, "left out of a structured output")
        if self.n > 1 or (self.best_of or 1) > 1:
            raise RequestError("trace_decode_token_ids", value, "left out where n or best_of is above 1")
        # As vLLM: the answer is no longer than the trace, and an end of text in it is a token like others.
        most = len(trace) if self.max_tokens is None else min(self.max_tokens, len(trace))
        msgspec.structs.force_setattr(self, "max_tokens", most)
        msgspec.structs.force_setattr(self, "ignore_eos", True)


@functools.cache
def field_types() -> dict[str, Any]:
    """Return the type of each field of `SamplingParams`."""
    return typing.get_type_hints(SamplingParams)


@functools.cache
def _optional_fields() -> frozenset[str]:
    return frozenset(name for name, type_ in field_types().items() if type(None) in typing.get_args(type_))


def _check_each(name: str, token_ids: list[int]) -> None:
    if bounds.are_ids(token_ids, MAX_INT32):
        return
    for token_id in token_ids:
        bounds.check("token_id", token_id, name)
