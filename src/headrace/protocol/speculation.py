"""`SpeculativeConfig`: which drafter is used, how many tokens it drafts, how they are verified. Names are vLLM's.

Pure: `config.EngineConfig` holds one, the command line makes it of a JSON object. The table `ROWS` has the range of
every field, checked at construction; `drafters.build` checks whether it fits the model. Knows no model, no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.protocol.errors import RequestError

FIELD = "speculative_config"
MODES = ("coupled", "rejection")
MAX_DRAFTS = 64
MAX_NODES = 128


class Method(NamedTuple):
    """Defaults of a method: `num_drafts` tokens deep, in trees of `num_nodes` (None: chains)."""

    num_drafts: int
    num_nodes: int | None = None


METHODS: dict[str, Method] = {
    "ngram": Method(16),
    "suffix": Method(16),
    "lookahead": Method(5, num_nodes=18),
    "draft_model": Method(4),
    "early_exit": Method(4),
    "medusa": Method(4, num_nodes=8),
    "eagle": Method(4, num_nodes=4),
    "eagle3": Method(4, num_nodes=4),
    "mtp": Method(4),
}


class Row(NamedTuple):
    """Allowed range of a number, ends included, and its meaning."""

    low: float
    high: float
    doc: str


ROWS: dict[str, Row] = {
    "num_speculative_tokens": Row(1, MAX_DRAFTS, "tokens guessed ahead at most; by default the method's own"),
    "prompt_lookup_min": Row(1, 64, "ngram: least number of last tokens that must have come before"),
    "prompt_lookup_max": Row(1, 64, "ngram: most of them that are looked for"),
    "num_tree_nodes": Row(1, MAX_NODES, "guesses of one step over all branches; num_speculative_tokens makes a chain"),
    "tree_width": Row(1, 16, "branches of a tree after one token"),
    "exit_layer": Row(1, 1024, "early_exit: layers that guess; by default the model's, or a quarter, at least 3"),
    "max_model_len": Row(16, 2**20, "last tokens that a drafter with a model looks at"),
    "lookahead_window": Row(1, 32, "lookahead: columns of the window"),
    "lookahead_ngram": Row(2, 16, "lookahead: tokens of the n-grams that it collects"),
    "lookahead_guesses": Row(1, 32, "lookahead: n-grams that are verified in one step"),
    "suffix_decoding_max_tree_depth": Row(2, 256, "suffix: tokens of a match that count for the guess's length"),
    "suffix_decoding_max_cached_requests": Row(0, 10**6, "suffix: finished requests whose tokens help others; 0: none"),
    "suffix_decoding_max_spec_factor": Row(0.0, 16.0, "suffix: guesses for each token of the match"),
    "suffix_decoding_min_token_prob": Row(0.0, 1.0, "suffix: share of the branches that a guess must have had"),
}  # fmt: skip

FRACTIONS = ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
OPTIONAL = ("num_speculative_tokens", "num_tree_nodes", "exit_layer")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to speculate. Drafts cannot change the output of `mode` "coupled"; "rejection" keeps the distribution
    (Leviathan et al. 2023, arXiv 2211.17192). None: the default of the method, or of the model.

    With `adaptive` the engine drafts less, or not at all, where that is measured to be faster. Raises `RequestError`
    naming the field as speculative_config.FIELD, the value and the bound.
    """

    method: str = ""
    model: str | None = None
    num_speculative_tokens: int | None = None
    mode: str = "coupled"
    adaptive: bool = True
    quantization: str | None = None
    max_model_len: int = 1024
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    num_tree_nodes: int | None = None
    tree_width: int = 4
    exit_layer: int | None = None
    lookahead_window: int = 3
    lookahead_ngram: int = 4
    lookahead_guesses: int = 3
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        for name in ("method", "mode"):
            if not isinstance(getattr(self, name), str):
                raise _error(name, getattr(self, name), "a text")
        for name in ("model", "quantization"):
            if getattr(self, name) is not None and (
                not isinstance(getattr(self, name), str) or not getattr(self, name)
            ):
                raise _error(name, getattr(self, name), "left out, or a text")
        if not self.method and self.model is not None:
            # As vLLM: a model without a method is "ngram", or drafts.
            msgspec.structs.force_setattr(self, "method", "ngram" if self.model == "ngram" else "draft_model")
        if self.method.endswith("_mtp"):
            # vLLM's names of the method for one model each, such as deepseek_mtp.
            msgspec.structs.force_setattr(self, "method", "mtp")
        if self.method not in METHODS:
            raise _error("method", self.method, "one of " + ", ".join(METHODS))
        if self.mode not in MODES:
            raise _error("mode", self.mode, "one of " + ", ".join(MODES))
        if not isinstance(self.adaptive, bool):
            raise _error("adaptive", self.adaptive, "true or false")
        for name, row in ROWS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                _check(name, value, row, whole=name not in FRACTIONS)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            bound = f"at most prompt_lookup_max ({self.prompt_lookup_max})"
            raise _error("prompt_lookup_min", self.prompt_lookup_min, bound)
        if self.num_tree_nodes is not None and self.num_tree_nodes < self.num_drafts:
            raise _error("num_tree_nodes", self.num_tree_nodes, f"at least num_speculative_tokens ({self.num_drafts})")

    @property
    def num_drafts(self) -> int:
        """The most tokens drafted ahead."""
        default = METHODS[self.method].num_drafts
        if self.method == "lookahead":
            default = min(self.lookahead_window + self.lookahead_ngram - 2, MAX_DRAFTS)
        return self.num_speculative_tokens or default

    @property
    def num_nodes(self) -> int:
        """The most tokens drafted in one step, over all branches. Rejection sampling takes chains."""
        if self.mode == "rejection":
            return self.num_drafts
        default = METHODS[self.method].num_nodes or 0
        if self.method == "lookahead":
            columns = self.lookahead_window + self.lookahead_guesses
            default = min(columns * (self.lookahead_ngram - 1), MAX_NODES)
        return max(self.num_tree_nodes or default, self.num_drafts)


def speculative_config(value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
    """Return the config of a JSON object, of its text, or of a dict. Raises `RequestError` for anything else."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(FIELD, value, f"a JSON object ({error})") from error
    if not isinstance(value, Mapping):
        raise RequestError(FIELD, value, 'a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}')
    for name in value:
        if name not in SpeculativeConfig.__struct_fields__:
            names = ", ".join(SpeculativeConfig.__struct_fields__)
            raise RequestError(f"{FIELD}.{name}", value[name], f"a field that headrace knows: {names}")
    return SpeculativeConfig(**value)


def _check(name: str, value: object, row: Row, whole: bool) -> None:
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not row.low <= value <= row.high:  # type: ignore[operator]
        kind = "an integer" if whole else "a number"
        raise _error(name, value, f"{kind} from {row.low:g} to {row.high:g}")


def _error(name: str, value: object, bound: str) -> RequestError:
    return RequestError(f"{FIELD}.{name}", value, bound)
