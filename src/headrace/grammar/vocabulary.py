"""`Vocabulary`: which bytes each token stands for, as the detokeniser reads them, so that a mask allows the text that
the client will read. Callers with a `Tokenizer` make it; here it becomes llguidance's tokenizer. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

Encode = Callable[[str], list[int]]

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """`tokens[i]` are the bytes of token i inside a text; none for a token that the tokenizer does not have, and none
    beyond its end, where the model's logits are wider. `special` tokens are no text: only a grammar that names one
    allows it. One of `eos_token_ids` ends an answer; there must be one.
    """

    tokens: list[bytes]
    special: list[int]
    eos_token_ids: list[int]

    @classmethod
    def of(
        cls,
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
        num_tokens: int,
        width: int,
        eos_token_ids: list[int],
    ) -> Vocabulary:
        """Make one of a tokenizer's first `num_tokens` tokens, padded to the `width` of the logits."""
        tokens = [token_bytes(i) for i in range(min(num_tokens, width))]
        special = {i for i in range(len(tokens)) if is_special(i)} | set(eos_token_ids)
        return cls(tokens + [b""] * (width - len(tokens)), sorted(special), list(eos_token_ids))


class _Wrapped:
    """The attributes of a tokenizer that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            # llguidance calls this with bytes first, to see whether they are accepted.
            raise TypeError("a text")
        return self._encode(text)


def make_tokenizer(vocabulary: Vocabulary, encode: Encode | None = None) -> LLTokenizer:
    """Make llguidance's tokenizer of the vocabulary.

    `encode` spells a text as the model's tokenizer would inside an answer; llguidance calls it to spell forced text.
    Without it, the longest token comes first. Takes about 4 ms for 1000 tokens, with the interpreter held.
    """
    import llguidance

    wrapped = llguidance.TokenizerWrapper(_Wrapped(vocabulary, _exact(vocabulary.tokens, encode)))
    return llguidance.LLTokenizer(wrapped, eos_token=list(vocabulary.eos_token_ids))


_MARK = "\x02"


def _exact(tokens: list[bytes], encode: Encode | None) -> Encode:
    """Return `encode` for the middle of a text: many tokenizers put a space before the beginning of one."""
    longest: dict[bytes, int] = {}

    def spell(text: str) -> list[int]:
        data = text.encode()
        for candidate in (text, _MARK + text):
            token_ids = [] if encode is None else encode(candidate)
            while token_ids and len(spelling := b"".join(tokens[i] for i in token_ids)) >= len(data):
                if spelling == data:
                    return token_ids
                token_ids = token_ids[1:]
        return longest_first(data)

    def longest_first(data: bytes) -> list[int]:
        if not longest:
            longest.update((token, i) for i, token in reversed(list(enumerate(tokens))) if token)
        most = max(map(len, longest))
        token_ids: list[int] = []
        while data:
            head = next((data[:n] for n in range(min(most, len(data)), 0, -1) if data[:n] in longest), None)
            if head is None:
                raise ValueError(f"no token begins with the byte {data[0]}")
            token_ids.append(longest[head])
            data = data[len(head) :]
        return token_ids

    return spell
