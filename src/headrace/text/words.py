"""From the texts in `SamplingParams` to token ids: bad words, DRY's sequence breakers, the marks of reasoning.

The engine knows no text, so the front end does this once for each request. Knows the tokenizer and the width of the
model's logits; called by `inputs.make_requests`.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import Tokenizer

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama-server's, for requests that name none."""

THINK = ("<think>", "</think>")
"""The marks of reasoning, unless the model is known to have others."""


def with_token_ids(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, marks: tuple[str, str] = THINK
) -> SamplingParams:
    """The same parameters, with token ids for every text in them that has none yet. `marks` begin and end reasoning.

    Raises `RequestError` for a text that needs a tokenizer where there is none.
    """
    found: dict[str, object] = {}
    if params.bad_words and params.bad_words_token_ids is None:
        known = _needed(tokenizer, "bad_words", params.bad_words)
        found["bad_words_token_ids"] = [ids for word in params.bad_words for ids in spellings(known, word)]
    if params.dry_multiplier > 0.0 and params.dry_sequence_breaker_ids is None:
        texts = params.dry_sequence_breakers
        if texts:
            _needed(tokenizer, "dry_sequence_breakers", texts)
        if tokenizer is not None:
            wanted = DRY_BREAKERS if texts is None else tuple(texts)
            found["dry_sequence_breaker_ids"] = [i for i in breakers(tokenizer, wanted) if i < vocab_size]
    if params.thinking_token_budget is not None and params.thinking_token_ids is None:
        known = _needed(tokenizer, "thinking_token_budget", params.thinking_token_budget)
        found["thinking_token_ids"] = (mark_ids(known, marks[0]), mark_ids(known, marks[1]))
    return msgspec.structs.replace(params, **found) if found else params


def spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Token ids of a word as it begins a text and as it comes after a space, as vLLM has it."""
    found: list[list[int]] = []
    for text in (word, " " + word.lstrip()):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if token_ids and token_ids not in found:
            found.append(token_ids)
    return found


def mark_ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    """A mark as the one token that it is, or else as a text's."""
    token_id = tokenizer.token_to_id(mark)
    return tokenizer.encode(mark, add_special_tokens=False) if token_id is None else [token_id]


@lru_cache(maxsize=64)
def breakers(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int]:
    """Ids, ascending, of the tokens that have one of `texts` in them; for a text in none, of its last token."""
    pieces = _spelled(tokenizer)
    found: set[int] = set()
    for text in texts:
        wanted = text.encode("utf-8", "surrogatepass")
        inside = [token_id for token_id, piece in enumerate(pieces) if wanted in piece]
        found.update(inside or tokenizer.encode(text, add_special_tokens=False)[-1:])
    return sorted(found)


@lru_cache(maxsize=4)
def _spelled(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]


def _needed(tokenizer: Tokenizer | None, field: str, value: object) -> Tokenizer:
    if tokenizer is None:
        raise RequestError(field, value, "left out, for the engine runs without a tokenizer; or give token ids")
    return tokenizer
