"""The bounds of every number and size that a request can carry: the bounds in the table of parameters, and further ones
here.

`SamplingParams`, the HTTP schemas and the engine's own check read `BOUNDS`, and the tests generate hostile values from
it, so a limit is written once. Holds no state; `docs/limits.md` is printed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import MAX_INT, MAX_INT32, PARAMETERS

T = TypeVar("T", bound=msgspec.Struct)
MAX_USUAL_LOGPROBS = 20
"""Log-probabilities of a token that any answer may have: the default of --max-logprobs."""
MAX_REPLY_LOGPROBS = 2**22
"""Log-probabilities of all answers of a call, where a token has more of them."""


class Bound(NamedTuple):
    """Allowed range of one field, ends included. `kind` is int, float, or size (length of a list or text)."""

    name: str
    kind: str
    low: float
    high: float
    doc: str

    def describe(self) -> str:
        """Return the range in words."""
        what = {"int": "an integer", "float": "a finite number", "size": "a length"}[self.kind]
        return f"{what} from {_show(self.low)} to {_show(self.high)}"

    def check(self, value: object, field: str | None = None) -> None:
        """Raise `RequestError` unless `value` is of the right type, finite and in range (for `size`, by `len`)."""
        name = field or self.name
        if self.kind == "size":
            if not hasattr(value, "__len__"):
                raise RequestError(name, value, f"something with {self.describe()}")
            number: object = len(value)
            quoted: object = number
        else:
            number = quoted = value
        # bool is an int in Python; a client that sends true for a count made a mistake.
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if self.kind == "float":
            is_number = is_number or isinstance(number, float)
        # The comparison is false for NaN, and exact for ints beyond the floats.
        if not is_number or not self.low <= number <= self.high:  # type: ignore[operator]
            raise RequestError(name, quoted, self.describe())


def _show(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


_PARAMETERS = [
    Bound(row.name, row.kind, row.low, row.high, row.doc)
    for row in PARAMETERS.values()
    if row.low is not None and row.high is not None
]
_OTHERS = [
    Bound("logit_bias_value", "float", -100.0, 100.0, "added to one token's logit"),
    Bound("watermark_gamma", "float", 0.01, 0.99, "share of tokens that are green after each token"),
    Bound("watermark_delta", "float", 0.0, 100.0, "added to green tokens' logits"),
    Bound("watermark_hashing_key", "int", 0, MAX_INT, "key of the green tokens"),
    Bound("lora_scale", "float", -1000.0, 1000.0, "by what an adapter's change of the model is multiplied"),
    Bound("token_id", "int", 0, MAX_INT32, "a token id, below the model's vocabulary size"),
    Bound("timeout", "float", 0.001, 86400.0, "seconds that the whole call may take; then it fails"),
    Bound("priority", "int", -(2**31), MAX_INT32, "lower is sooner, under --scheduling-policy priority"),
    Bound("truncate_prompt_tokens", "int", -1, MAX_INT32, "last tokens of the prompt kept; -1: all that fit"),
    Bound("beam_width", "int", 1, 64, "beams that a beam search keeps"),
    Bound("length_penalty", "float", -8.0, 8.0, "power of the length that a beam's score is divided by"),
    Bound("num_beam_groups", "int", 1, 64, "groups of a diverse beam search; divides beam_width"),
    Bound("diversity_penalty", "float", 0.0, 100.0, "cost of a token that an earlier group has chosen"),
    Bound("max_string_length", "int", 1, MAX_INT32, "of a model's generation_config.json: characters of a JSON string"),
    # Sizes.
    Bound("stop_string", "size", 1, 1024, "characters of one stop string"),
    Bound("bad_word", "size", 1, 256, "characters of one bad word"),
    Bound("dry_sequence_breaker", "size", 1, 64, "characters of one such text"),
    Bound("structured_text", "size", 1, 2**16, "characters of a schema, regex, grammar or all choices"),
    Bound("choices", "size", 1, 4096, "texts that an answer may be chosen from"),
    Bound("whitespace_pattern", "size", 1, 1024, "characters of the regex for whitespace in JSON"),
    Bound("prompt_list", "size", 1, 256, "prompts in one request"),
    Bound("scored_texts", "size", 1, 2048, "texts that a call of /rerank, /score or /similarity compares"),
    Bound("row_numbers", "int", 1, 2**20, "numbers in a call's vectors of tokens (`token_embed`) or over a vocabulary"),
    Bound("tools", "size", 0, 1024, "tools of one chat"),
    Bound("messages", "size", 1, 4096, "chat messages in one request"),
    Bound("text", "size", 0, 8 * 2**20, "characters of a prompt or of a message"),
    Bound("cache_salt", "size", 1, 256, "characters of the prefix cache's salt"),
    Bound("label", "size", 0, 512, "characters of user, safety_identifier, prompt_cache_key, metadata.user_id"),
    Bound("request_id", "size", 1, 256, "characters of the client's own request id"),
]
BOUNDS = {bound.name: bound for bound in [*_PARAMETERS, *_OTHERS]}


def struct_of(kind: type[T], value: Mapping[str, Any], field: str) -> T:
    """Return a struct of the type `kind` with the fields `value`. Raises `RequestError` for a field that it lacks."""
    for name in value:
        if name not in kind.__struct_fields__:
            raise RequestError(f"{field}.{name}", value[name], "a field that headrace knows", "unknown_field")
    return kind(**value)


def are_ids(values: Sequence[Any], most: int) -> bool:
    """Return whether all values are integers from 0 to `most`. Without a loop in Python: a prompt may have a million,
    and this runs on event loops."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= most)


def check(name: str, value: object, field: str | None = None) -> None:
    """Check `value` against the row `name` of the table; `field` is the name to report, if it differs."""
    BOUNDS[name].check(value, field)
