"""The one table of bounds: every numeric and size field that a request can carry, with its type, range and default.

`SamplingParams`, the HTTP schemas and the engine's own check all read this table, and the tests generate their
hostile values from it, so a limit is written once. Holds no state, imports only `errors`; `docs/limits.md` is
printed from it.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.protocol.errors import RequestError

MAX_INT = 2**63 - 1


class Bound(NamedTuple):
    """Allowed range of one field, ends included. `kind` is int, float, or size (length of a list or text)."""

    name: str
    kind: str
    low: float
    high: float
    default: float | None
    doc: str

    def describe(self) -> str:
        what = {"int": "an integer", "float": "a finite number", "size": "a length"}[self.kind]
        return f"{what} from {_show(self.low)} to {_show(self.high)}"

    def check(self, value: object, field: str | None = None) -> None:
        """Raise `RequestError` unless `value` is of the right type, finite and in range (for `size`, by `len`)."""
        name = field or self.name
        if self.kind == "size":
            if not hasattr(value, "__len__"):
                raise RequestError(name, value, f"something with {self.describe()}")
            number: object = len(value)
            shown: object = number
        else:
            number = shown = value
        # bool is an int in Python; a client that sends true for a count made a mistake.
        right = isinstance(number, int) and not isinstance(number, bool)
        if self.kind == "float":
            right = right or isinstance(number, float)
        # The comparison is false for NaN, and exact for ints beyond the floats.
        if not right or not self.low <= number <= self.high:  # type: ignore[operator]
            raise RequestError(name, shown, self.describe())


def _show(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _table(*rows: Bound) -> dict[str, Bound]:
    return {row.name: row for row in rows}


BOUNDS: dict[str, Bound] = _table(
    # Sampling. Defaults are vLLM's.
    Bound("n", "int", 1, 128, 1, "answers to one prompt"),
    Bound("temperature", "float", 0.0, 100.0, 1.0, "0 is greedy"),
    Bound("top_p", "float", 1e-6, 1.0, 1.0, "nucleus mass kept"),
    Bound("top_k", "int", -1, 2**31 - 1, 0, "most likely tokens kept; 0 and -1 keep all"),
    Bound("min_p", "float", 0.0, 1.0, 0.0, "floor, relative to the likeliest token"),
    Bound("seed", "int", 0, MAX_INT, None, "key of the noise; one is drawn if none is given"),
    Bound("max_tokens", "int", 1, 2**31 - 1, 16, "tokens to generate at most"),
    Bound("min_tokens", "int", 0, 2**31 - 1, 0, "no EOS and no stop token before as many"),
    Bound("logprobs", "int", -1, 2**31 - 1, None, "alternatives reported per token; -1 is the whole vocabulary"),
    Bound("prompt_logprobs", "int", -1, 2**31 - 1, None, "the same for the prompt's tokens"),
    Bound("logit_bias_value", "float", -100.0, 100.0, None, "added to one token's logit"),
    Bound("best_of", "int", 1, 128, None, "answers made, of which the n likeliest are told"),
    Bound("repetition_penalty", "float", 0.01, 100.0, 1.0, "divides logits above 0 of tokens seen, multiplies others"),
    Bound("frequency_penalty", "float", -2.0, 2.0, 0.0, "subtracted for each time that the answer has the token"),
    Bound("presence_penalty", "float", -2.0, 2.0, 0.0, "subtracted if the answer has the token"),
    Bound("repeat_last_n", "int", -1, 2**31 - 1, -1, "last tokens that the penalties look at; -1: all"),
    Bound("typical_p", "float", 1e-6, 1.0, 1.0, "mass kept of the tokens of most typical surprise"),
    Bound("top_n_sigma", "float", -1.0, 1000.0, -1.0, "deviations below the greatest logit kept; 0 and below keep all"),
    Bound("xtc_probability", "float", 0.0, 1.0, 0.0, "chance that the top choices are excluded"),
    Bound("xtc_threshold", "float", 0.0, 1.0, 0.1, "least probability of a top choice; above 0.5 none is"),
    Bound("dry_multiplier", "float", 0.0, 100.0, 0.0, "penalty of a repetition of dry_allowed_length tokens; 0 is off"),
    Bound("dry_base", "float", 1.0, 100.0, 1.75, "growth of the penalty with each token more"),
    Bound("dry_allowed_length", "int", 0, 64, 2, "tokens that may be repeated freely, less one"),
    Bound("dry_penalty_last_n", "int", -1, 2**31 - 1, -1, "last tokens searched for repetitions; -1: all, 0: none"),
    Bound("mirostat", "int", 0, 2, 0, "version of mirostat; 0 is off"),
    Bound("mirostat_tau", "float", 0.0, 100.0, 5.0, "surprise aimed at, in bits"),
    Bound("mirostat_eta", "float", 0.0, 10.0, 0.1, "share of the error corrected at each token"),
    Bound("dynatemp_range", "float", 0.0, 100.0, 0.0, "temperature varies by as much up and down; 0 is off"),
    Bound("dynatemp_exponent", "float", 0.0, 100.0, 1.0, "of the entropy's share, which sets the temperature"),
    Bound("adaptive_target", "float", -1.0, 1.0, -1.0, "mean probability that adaptive-p aims at; negative: off"),
    Bound("adaptive_decay", "float", 0.0, 0.99, 0.9, "share of the mean that a token leaves as it was"),
    Bound("no_repeat_ngram_size", "int", 0, 64, 0, "no run of as many tokens comes twice; 0 is off"),
    Bound("thinking_token_budget", "int", 0, 2**31 - 1, None, "tokens of reasoning before its end is forced"),
    Bound("watermark_gamma", "float", 0.01, 0.99, 0.25, "share of tokens that are green after each token"),
    Bound("watermark_delta", "float", 0.0, 100.0, 2.0, "added to green tokens' logits"),
    Bound("watermark_hashing_key", "int", 0, MAX_INT, 15485863, "key of the green tokens"),
    Bound("token_id", "int", 0, 2**31 - 1, None, "a token id, below the model's vocabulary size"),
    Bound("timeout", "float", 0.001, 86400.0, None, "seconds that the whole call may take; then it fails"),
    Bound("priority", "int", -(2**31), 2**31 - 1, 0, "lower is sooner, under --scheduling-policy priority"),
    Bound("truncate_prompt_tokens", "int", -1, 2**31 - 1, None, "last tokens of the prompt kept; -1: all that fit"),
    Bound("beam_width", "int", 1, 64, None, "beams that a beam search keeps"),
    Bound("length_penalty", "float", -8.0, 8.0, 1.0, "power of the length that a beam's score is divided by"),
    Bound("num_beam_groups", "int", 1, 64, 1, "groups of a diverse beam search; divides beam_width"),
    Bound("diversity_penalty", "float", 0.0, 100.0, 0.0, "cost of a token that an earlier group has chosen"),
    # Sizes.
    Bound("stop", "size", 0, 16, None, "number of stop strings"),
    Bound("stop_string", "size", 1, 1024, None, "characters of one stop string"),
    Bound("stop_token_ids", "size", 0, 256, None, "number of stop token ids"),
    Bound("logit_bias", "size", 0, 1024, None, "number of biased tokens"),
    Bound("allowed_token_ids", "size", 0, 2**18, None, "number of tokens that may come at all"),
    Bound("trace_decode_token_ids", "size", 1, 2**18, None, "tokens that an answer is made to be"),
    Bound("bad_words", "size", 0, 256, None, "number of words that must not come"),
    Bound("bad_word", "size", 1, 256, None, "characters of one bad word"),
    Bound("dry_sequence_breakers", "size", 0, 16, None, "number of texts that end a repetition"),
    Bound("dry_sequence_breaker", "size", 1, 64, None, "characters of one such text"),
    Bound("samplers", "size", 0, 10, None, "number of samplers in a chosen order"),
    Bound("structured_text", "size", 1, 2**16, None, "characters of a schema, regex, grammar or all choices"),
    Bound("choices", "size", 1, 4096, None, "texts that an answer may be chosen from"),
    Bound("whitespace_pattern", "size", 1, 1024, None, "characters of the regex for whitespace in JSON"),
    Bound("prompt_list", "size", 1, 256, None, "prompts in one request"),
    Bound("tools", "size", 0, 1024, None, "tools of one chat"),
    Bound("messages", "size", 1, 4096, None, "chat messages in one request"),
    Bound("text", "size", 0, 8 * 2**20, None, "characters of a prompt or of a message"),
    Bound("cache_salt", "size", 1, 256, None, "characters of the prefix cache's salt"),
    Bound("request_id", "size", 1, 256, None, "characters of the client's own request id"),
)


def check(name: str, value: object, field: str | None = None) -> None:
    """Check `value` against the row `name` of the table; `field` is the name to report, if it differs."""
    BOUNDS[name].check(value, field)
