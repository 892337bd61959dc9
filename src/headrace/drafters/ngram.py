"""Prompt lookup: the draft is the text after an earlier occurrence of the last few tokens (Saxena 2023; Yang et al.
2023, arXiv 2304.04487). Good where the answer repeats its prompt: edits, summaries, quotes.

For every n-gram of `min_tokens` tokens its last end is kept, and for each end the one before it of the same n-gram, as
in LZ77; so a draft costs a walk along these ends, however long the context is. Knows tokens only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headrace.drafters.base import Context, Drafter, Target
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft

MAX_SEQS = 1024
MAX_CANDIDATES = 64
"""Occurrences of the same n-gram that are compared for a longer match, the latest first."""
MAX_MATCH = 32
"""Tokens of a match that count for the length of the draft."""


class NGramIndex:
    """The ends of the n-grams of `size` tokens in a growing list: `last[n-gram]` is the last end, `before[end]` the one
    before it of the same n-gram; 0 is none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.last: dict[int | tuple[int, ...], int] = {}
        self.before: list[int] = []

    def key(self, tokens: list[int], end: int) -> int | tuple[int, ...]:
        return tokens[end - 1] if self.size == 1 else tuple(tokens[end - self.size : end])

    def extend(self, tokens: list[int]) -> None:
        """Add all n-grams that end before the last token: they have a successor."""
        last, before = self.last, self.before
        for end in range(len(before), len(tokens)):
            if end < self.size:
                before.append(0)
                continue
            key = self.key(tokens, end)
            before.append(last.get(key, 0))
            last[key] = end


class NgramDrafter(Drafter):
    """Drafts by the longest match of at least `min_tokens` and at most `max_tokens` last tokens; of equally long ones
    the latest. A draft has at most twice the tokens of the whole match: a short match is often chance, a long one often
    a quote that goes on."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min = min_tokens
        self._max = max_tokens
        self._indexes: OrderedDict[int, NGramIndex] = OrderedDict()

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [Draft(self._guess(context)) for context in contexts]

    def drop(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def close(self) -> None:
        self._indexes.clear()

    def _guess(self, context: Context) -> list[int]:
        tokens = context.tokens
        index = self._indexes.get(context.seq_id)
        if index is None or len(index.before) > len(tokens):
            index = self._indexes[context.seq_id] = NGramIndex(self._min)
            if len(self._indexes) > MAX_SEQS:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(context.seq_id)
        index.extend(tokens)
        end = self._find(index, tokens)
        if not end:
            return []
        length, most = self._min, min(MAX_MATCH, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        # A match may overlap its own continuation: then the text is periodic, and the period is repeated.
        period = len(tokens) - end
        return [tokens[end + i % period] for i in range(min(context.num_drafts, 2 * length))]

    def _find(self, index: NGramIndex, tokens: list[int]) -> int:
        """Return the end of the best match; 0 if there is none."""
        size = len(tokens)
        if size <= self._min:
            return 0
        place = index.last.get(index.key(tokens, size), 0)
        best, longest = 0, self._min - 1
        for _ in range(MAX_CANDIDATES):
            if not place:
                break
            length = 0
            while length < min(self._max, place) and tokens[place - 1 - length] == tokens[size - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == self._max:
                    break
            place = index.before[place]
        return best


def make(spec: SpeculativeConfig, target: Target) -> NgramDrafter:
    """Make the drafter."""
    return NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max)
