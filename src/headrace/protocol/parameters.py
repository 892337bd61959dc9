"""The table of request parameters: one row for each field of `SamplingParams` that a caller can set.

A row holds the field's kind, range and meaning, and its name in each API; the field in `protocol.params` has the type
and the default. From both follow the check of a request, the fields and names in every API (`serve.call.call`),
the ranges in the OpenAPI document, the help of flags and docs/limits.md. `NONES` and `LEAST` are the values that an API
has beyond the engine's range. Imports nothing of headrace.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MAX_INT = 2**63 - 1
MAX_INT32 = 2**31 - 1

OPENAI, ANTHROPIC, OLLAMA, LLAMA_SERVER = "openai", "anthropic", "ollama", "llama_server"
APIS = {OPENAI: "OpenAI", ANTHROPIC: "Anthropic", OLLAMA: "Ollama", LLAMA_SERVER: "llama-server"}
"""The names of the APIs, as people write them. OpenAI's has vLLM's extensions, under vLLM's names."""

# The APIs that have a parameter under its own name.
_OFFLINE: tuple[str, ...] = ()
_VLLM = (OPENAI,)
_LLAMA = (OPENAI, LLAMA_SERVER)
_LOCAL = (OPENAI, LLAMA_SERVER, OLLAMA)
_ALL = tuple(APIS)


class Parameter(NamedTuple):
    """One row. `kind` is int, float, bool, size (a text, list or dict whose length is bounded) or object (checked by a
    struct). The range from `low` to `high`, ends included, is None for the last and for bool. `names` has the name in
    each API that takes the parameter; one with a dot stands in an object of that name."""

    name: str
    kind: str
    low: float | None
    high: float | None
    doc: str
    names: Mapping[str, str]


def _row(
    name: str, kind: str, low: float | None, high: float | None, doc: str, apis: tuple[str, ...], **other_names: str
) -> Parameter:
    return Parameter(name, kind, low, high, doc, dict.fromkeys(apis, name) | other_names)


_ROWS = (
    _row("n", "int", 1, 128, "answers to one prompt", _VLLM),
    _row("temperature", "float", 0.0, 100.0, "0 is greedy", _ALL),
    _row("top_p", "float", 1e-6, 1.0, "nucleus mass kept", _ALL),
    _row("top_k", "int", -1, MAX_INT32, "most likely tokens kept; 0 and -1 keep all", _ALL),
    _row("min_p", "float", 0.0, 1.0, "floor, relative to the likeliest token", _LOCAL),
    _row("seed", "int", 0, MAX_INT, "key of the noise; one is drawn if none is given", _LOCAL),
    _row("max_tokens", "int", 1, MAX_INT32, "tokens to generate at most", (OPENAI, ANTHROPIC), ollama="num_predict",
         llama_server="n_predict"),
    _row("min_tokens", "int", 0, MAX_INT32, "no EOS and no stop token before as many", _VLLM),
    _row("ignore_eos", "bool", None, None, "go on after the model's end-of-text token", _LLAMA),
    _row("stop", "size", 0, 16, "text that ends the answer", _LOCAL, anthropic="stop_sequences"),
    _row("stop_token_ids", "size", 0, 256, "token id that ends the answer", _VLLM),
    _row("include_stop_str_in_output", "bool", None, None, "keep the stop text in the answer", _VLLM),
    _row("logprobs", "int", -1, MAX_INT32, "alternatives reported per token; -1 is the whole vocabulary", _VLLM,
         llama_server="n_probs"),
    _row("prompt_logprobs", "int", -1, MAX_INT32, "the same for the prompt's tokens", _VLLM),
    _row("post_sampling_probs", "bool", None, None, "logprobs of the distribution after the samplers", _LLAMA),
    _row("logit_bias", "size", 0, 1024, "added to logits, by token id", _LLAMA),
    _row("best_of", "int", 1, 128, "answers made, of which the n likeliest are returned", _VLLM),
    _row("detokenize", "bool", None, None, "return the answer as text, too", _OFFLINE),
    _row("skip_special_tokens", "bool", None, None, "leave special tokens out of the text", _VLLM),
    _row("spaces_between_special_tokens", "bool", None, None, "put spaces between special tokens in the text", _VLLM),
    _row("repetition_penalty", "float", 0.01, 100.0, "divides logits above 0 of tokens seen, multiplies others", _VLLM,
         ollama="repeat_penalty", llama_server="repeat_penalty"),
    _row("frequency_penalty", "float", -2.0, 2.0, "subtracted for each time that the answer has the token", _LOCAL),
    _row("presence_penalty", "float", -2.0, 2.0, "subtracted if the answer has the token", _LOCAL),
    _row("repeat_last_n", "int", -1, MAX_INT32, "last tokens that the penalties look at; -1: all", _LOCAL),
    _row("typical_p", "float", 1e-6, 1.0, "mass kept of the tokens of most typical surprise", _LOCAL),
    _row("top_n_sigma", "float", -1.0, 1000.0, "deviations below the greatest logit kept; 0 and below keep all",
         _LLAMA),
    _row("xtc_probability", "float", 0.0, 1.0, "chance that the top choices are excluded", _LLAMA),
    _row("xtc_threshold", "float", 0.0, 1.0, "least probability of a top choice; above 0.5 none is", _LLAMA),
    _row("dry_multiplier", "float", 0.0, 100.0, "penalty of a repetition of dry_allowed_length tokens; 0 is off",
         _LLAMA),
    _row("dry_base", "float", 1.0, 100.0, "growth of the penalty with each token more", _LLAMA),
    _row("dry_allowed_length", "int", 0, 64, "tokens that may be repeated freely, less one", _LLAMA),
    _row("dry_penalty_last_n", "int", -1, MAX_INT32, "last tokens searched for repetitions; -1: all, 0: none", _LLAMA),
    _row("dry_sequence_breakers", "size", 0, 16, "text that ends a repetition", _LLAMA),
    _row("mirostat", "int", 0, 2, "version of mirostat; 0 is off", _LOCAL),
    _row("mirostat_tau", "float", 0.0, 100.0, "surprise aimed at, in bits", _LOCAL),
    _row("mirostat_eta", "float", 0.0, 10.0, "share of the error corrected at each token", _LOCAL),
    _row("dynatemp_range", "float", 0.0, 100.0, "temperature varies by as much up and down; 0 is off", _LLAMA),
    _row("dynatemp_exponent", "float", 0.0, 100.0, "of the entropy's share, which sets the temperature", _LLAMA),
    _row("adaptive_target", "float", -1.0, 1.0, "mean probability that adaptive-p aims at; negative: off", _LLAMA),
    _row("adaptive_decay", "float", 0.0, 0.99, "share of the mean that a token leaves as it was", _LLAMA),
    _row("allowed_token_ids", "size", 0, 2**18, "token id that may come; all others are banned", _VLLM),
    _row("bad_words", "size", 0, 256, "word that must not come", _VLLM),
    _row("no_repeat_ngram_size", "int", 0, 64, "no run of as many tokens comes twice; 0 is off", _VLLM),
    _row("thinking_token_budget", "int", 0, MAX_INT32, "tokens of reasoning before its end is forced", _VLLM,
         anthropic="thinking.budget_tokens"),
    _row("trace_decode_token_ids", "size", 1, 2**18, "token ids that the answer is made to be", _VLLM),
    _row("watermark", "object", None, None, "true, or an object with gamma, delta and hashing_key", _VLLM),
    _row("samplers", "size", 0, 10, "samplers that run, in this order", _LLAMA),
    _row("structured_outputs", "object", None, None, "form of the answer: json, regex, choice, grammar and others",
         _VLLM),
    _row("speculation", "bool", None, None, "verify draft tokens, under --speculative-config", _VLLM),
)  # fmt: skip

PARAMETERS = {row.name: row for row in _ROWS}


@functools.cache
def names_in(api: str) -> Mapping[str, str]:
    """Return the parameters that an API takes: each field of `SamplingParams` with its name there."""
    return MappingProxyType({row.name: row.names[api] for row in PARAMETERS.values() if api in row.names})


def spelling_of(api: str, prefix: str = "") -> dict[str, str]:
    """Return the names that an API has for the fields of `SamplingParams`; `prefix` names the object with these
    fields."""
    return {field: prefix + name for field, name in names_in(api).items()}


LEAST_SHARE = 1e-6
"""A share of 0 is greedy in every API; here a share is above 0, and the least one keeps one token."""
SHARES = ("top_p", "typical_p")
# Values that mean "none", as a missing field does: llama.cpp's values for a random seed and for an endless answer.
# OpenAI's clients send the former too.
NO_SEED = 2**32 - 1
_SEEDS = (-1, NO_SEED)
NONES: dict[str, dict[str, tuple[int, ...]]] = {
    OPENAI: {"seed": (-1,)},
    OLLAMA: {"seed": _SEEDS, "max_tokens": (-2, -1, 0)},
    LLAMA_SERVER: {"seed": _SEEDS, "max_tokens": (-2, -1)},
}
OWN_DEFAULTS: dict[str, dict[str, float]] = {
    OLLAMA: {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    LLAMA_SERVER: {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
"""The defaults of APIs that differ from the table's: they hold where neither the request nor the model's files nor a
flag of the server sets a parameter. Chats of the command line and of the page have llama-server's."""
LEAST: dict[str, float] = dict.fromkeys(SHARES, 0.0) | {"seed": -1, "max_tokens": 0}
"""The least values of parameters in APIs that allow less than the table does."""
WIDER = frozenset(PARAMETERS[field].names[api] for api in (OLLAMA, LLAMA_SERVER) for field in (*SHARES, *NONES[api]))
"""The options, by llama.cpp's names, whose range is wider than the engine's."""
