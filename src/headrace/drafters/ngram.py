"""Prompt lookup: the draft is the text after an earlier occurrence of the last few tokens (Saxena 2023; Yang et al.
2023, arXiv 2304.04487). Good where the answer repeats its prompt: edits, summaries, quotes.

For every n-gram of `min_tokens` tokens its last end is kept, and for each end the one before it of the same n-gram, as
in LZ77; so a draft costs a walk along these ends, however long the context is. Knows tokens only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from headrace.drafters.base import Context, Drafter, Target
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft

MAX_SEQS = 1024
MAX_CANDIDATES = 64
"""Occurrences of the same n-gram that are compared for a longer match, the latest first."""
MAX_SEARCHES = 8
"""Searches of a sequence before it gets an index."""
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
        last, before, size = self.last, self.before, self.size
        before += [0] * (min(size, len(tokens)) - len(before))
        first = len(before) - size
        parts: Iterable[Any] = (
            tokens[first:-1] if size == 1 else zip(*(tokens[first + i : -1] for i in range(size)), strict=False)
        )
        for end, key in enumerate(parts, len(before)):
            before.append(last.get(key, 0))
            last[key] = end

    def ends(self, tokens: list[int]) -> Iterator[int]:
        """The earlier ends of the last `size` tokens, the latest first."""
        place = self.last.get(self.key(tokens, len(tokens)), 0) if len(tokens) > self.size else 0
        while place:
            yield place
            place = self.before[place]


class NgramDrafter(Drafter):
    """Drafts by the longest match of at least `min_tokens` and at most `max_tokens` last tokens; of equally long ones
    the latest. A draft has at most twice the tokens of the whole match: a short match is often chance, a long one often
    a quote that goes on."""

    looks_back = True

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min = min_tokens
        self._max = max_tokens
        # How often each sequence was searched, and its index once it has one.
        self._indexes: OrderedDict[int, tuple[int, NGramIndex | None]] = OrderedDict()

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [Draft(self._guess(context)) for context in contexts]

    def drop(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def close(self) -> None:
        self._indexes.clear()

    def _guess(self, context: Context) -> list[int]:
        tokens = context.tokens
        end = self._find(self._ends(context.seq_id, tokens), tokens)
        if not end:
            return []
        length, most = self._min, min(MAX_MATCH, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        # A match may overlap its own continuation: then the text is periodic, and the period is repeated.
        period = len(tokens) - end
        return [tokens[end + i % period] for i in range(min(context.num_drafts, 2 * length))]

    def _ends(self, seq_id: int, tokens: list[int]) -> Iterator[int]:
        """The earlier ends of the last `min_tokens` tokens, the latest first. A sequence that is asked about for the
        first few times is searched, which takes less time than to index it."""
        num_searches, index = self._indexes.pop(seq_id, (0, None))
        if num_searches < MAX_SEARCHES:
            self._indexes[seq_id] = num_searches + 1, None
            ends = found(tokens, self._min)
        else:
            if index is None or len(index.before) > len(tokens):
                index = NGramIndex(self._min)
            self._indexes[seq_id] = num_searches, index
            index.extend(tokens)
            ends = index.ends(tokens)
        if len(self._indexes) > MAX_SEQS:
            self._indexes.popitem(last=False)
        return ends

    def _find(self, ends: Iterator[int], tokens: list[int]) -> int:
        """Return the end of the best match; 0 if there is none."""
        size, best, longest = len(tokens), 0, self._min - 1
        for place in islice(ends, MAX_CANDIDATES):
            length = 0
            while length < min(self._max, place) and tokens[place - 1 - length] == tokens[size - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == self._max:
                    break
        return best


def found(tokens: list[int], size: int) -> Iterator[int]:
    """The ends before the last token of the last `size` tokens, the latest first, found by a search."""
    text = array("i", tokens)
    width, raw = text.itemsize, text.tobytes()
    key, stop = raw[-size * width :], len(tokens) - 1
    while stop >= size:
        place = raw.rfind(key, 0, stop * width)
        if place < 0:
            return
        stop, rest = divmod(place, width)
        stop += size
        if not rest:
            yield stop
            stop -= 1


def make(spec: SpeculativeConfig, target: Target) -> NgramDrafter:
    """Make the drafter."""
    return NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max)
