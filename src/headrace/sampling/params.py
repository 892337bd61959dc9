"""`SamplingParams`: what a request may say about how its tokens are chosen. Names and defaults are vLLM's.

Frozen, checked against `headrace.bounds` when made, and sent as it is from the server to the engine. Knows no
tensors, no text beyond the stop strings (which the server matches), no model. The engine checks token ids against
the model's width, which is not known here.
"""

from __future__ import annotations

import msgspec

from headrace import bounds
from headrace.errors import RequestError
from headrace.sampling.constraints import StructuredOutputs, constraint_of

BOOLS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request.

    Raises `RequestError` naming the field, the value and the bound.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("n", "temperature", "top_p", "top_k", "min_p", "min_tokens"):
            bounds.check(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                bounds.check(name, getattr(self, name))
        for name in BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "true or false")
        if self.structured_outputs is not None:
            msgspec.structs.force_setattr(self, "structured_outputs", constraint_of(self.structured_outputs))
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        if self.stop:
            bounds.check("stop", self.stop)
            for text in self.stop:
                if not isinstance(text, str):
                    raise RequestError("stop", text, "a string, or a list of strings")
                bounds.check("stop_string", text, "stop")
        if self.stop_token_ids:
            bounds.check("stop_token_ids", self.stop_token_ids)
            for token_id in self.stop_token_ids:
                bounds.check("token_id", token_id, "stop_token_ids")
        if self.logit_bias:
            if not isinstance(self.logit_bias, dict):
                raise RequestError("logit_bias", self.logit_bias, "a dict of token ids to numbers")
            bounds.check("logit_bias", self.logit_bias)
            for token_id, value in self.logit_bias.items():
                bounds.check("token_id", token_id, "logit_bias")
                bounds.check("logit_bias_value", value, "logit_bias")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must see the tokens so far."""
        return self.structured_outputs is not None
