"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the model drafts for itself. While it computes the next token
it improves a window of later ones by Jacobi's iteration; the resulting n-grams are kept, and verified where they fit.

The paper's attention mask is a tree's. Column i of the window is the first i + 1 tokens of its first row, then the
column's tokens of the rows below: a path from the root; columns share the first row. The target's likeliest token after
the last node of a column (`verified`) is the column's new token, and ends an n-gram. N-grams that begin with the last
known token are further branches from the root. Knows tokens only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.drafters.base import Context, Drafter, Target
from headrace.protocol.errors import RequestError
from headrace.protocol.speculation import FIELD, SpeculativeConfig
from headrace.protocol.step import Draft

MAX_SEQS = 1024
MAX_NGRAMS = 2048
"""N-grams of a sequence; the longest unused are dropped."""


class Window:
    """A sequence's window: rows [up to n - 1][width] of tokens, and its n-grams, by their first token."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self.rows: list[list[int]] = [list(seeds)]
        self.ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self.num_ngrams = 0
        self.num_seeds = 0
        self.tokens_seen = 0
        self.ends: list[int] = []
        """The last node of each column in the current draft; -1: it did not fit."""

    def keep(self, first: int, rest: tuple[int, ...], most: int) -> None:
        """Keep an n-gram as the latest; at most `most` with the same first token."""
        group = self.ngrams.setdefault(first, OrderedDict())
        self.num_ngrams -= len(group)
        group.pop(rest, None)
        group[rest] = None
        if len(group) > most:
            group.popitem(last=False)
        self.num_ngrams += len(group)
        self.ngrams.move_to_end(first)
        while self.num_ngrams > MAX_NGRAMS:
            _, oldest = self.ngrams.popitem(last=False)
            self.num_ngrams -= len(oldest)


class Trie:
    """A draft that is put together of paths: equal beginnings share their nodes."""

    def __init__(self, depth: int, num_nodes: int) -> None:
        self.draft = Draft([])
        self._depth = depth
        self._num_nodes = num_nodes
        self._children: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int]) -> int:
        """Return the node that ends `path`; -1, and nothing is added, if it does not fit."""
        node, num_shared = -1, 0
        for token in path:
            child = self._children.get((node, token))
            if child is None:
                break
            node, num_shared = child, num_shared + 1
        token_ids = self.draft.token_ids
        if len(path) > self._depth or len(token_ids) + len(path) - num_shared > self._num_nodes:
            return -1
        for token in path[num_shared:]:
            self._children[node, token] = len(token_ids)
            self.draft.parents.append(node)
            node = len(token_ids)
            token_ids.append(token)
        return node


class LookaheadDrafter(Drafter):
    """`width` columns, n-grams of `size` tokens, of which `num_guesses` are verified in a step."""

    def __init__(self, width: int, size: int, num_guesses: int) -> None:
        self._width = width
        self._size = size
        self._num_guesses = num_guesses
        self._windows: OrderedDict[int, Window] = OrderedDict()

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        window = self._windows.get(seq_id)
        if window is None or not window.ends:
            return
        ends, window.ends = window.ends, []
        latest = [best[end] if 0 <= end < len(best) else -1 for end in ends]
        if max(latest) < 0:
            return
        full = len(window.rows) == self._size - 1
        for column, token in enumerate(latest):
            if token < 0:
                # Not computed: the old token stays; any token is a valid start.
                latest[column] = window.rows[-1][column]
            elif full:
                path = [row[column] for row in window.rows]
                window.keep(path[0], (*path[1:], token), self._num_guesses)
        if full:
            window.rows.pop(0)
        window.rows.append(latest)

    def drop(self, seq_id: int) -> None:
        self._windows.pop(seq_id, None)

    def close(self) -> None:
        self._windows.clear()

    def _draft(self, context: Context) -> Draft:
        window = self._windows.get(context.seq_id)
        tokens = context.tokens
        if window is None or window.tokens_seen > len(tokens):
            window = self._windows[context.seq_id] = Window(self._seeds(context.tokens, self._width))
            window.tokens_seen = len(tokens)
            if len(self._windows) > MAX_SEQS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(context.seq_id)
        # Each step moves the rows by one token; accepted draft tokens move the columns in addition.
        self._move(window, len(tokens) - window.tokens_seen - 1, tokens)
        window.tokens_seen = len(tokens)
        trie = Trie(context.num_drafts, context.num_nodes)
        group = window.ngrams.get(tokens[-1])
        if group is not None:
            for rest in list(reversed(group))[: self._num_guesses]:
                trie.add(rest[: context.num_drafts])
        window.ends = []
        first = window.rows[0]
        for column in range(self._width):
            path = [*first[: column + 1], *(row[column] for row in window.rows[1:])]
            window.ends.append(trie.add(path))
        return trie.draft

    def _move(self, window: Window, columns: int, tokens: list[int]) -> None:
        columns = min(columns, self._width)
        if columns <= 0:
            return
        for row in window.rows:
            row[:] = row[columns:] + self._seeds(tokens, columns, window.num_seeds)
            window.num_seeds += columns

    @staticmethod
    def _seeds(tokens: list[int], count: int, before: int = 0) -> list[int]:
        """Return tokens of the text to start from: picked by a fixed stride, without chance."""
        return [tokens[(7919 * (before + i) + 31) % len(tokens)] for i in range(count)]


def make(spec: SpeculativeConfig, target: Target) -> LookaheadDrafter:
    """Make the drafter. Raises `RequestError` where only chains can be verified."""
    if spec.mode == "rejection":
        raise RequestError(f"{FIELD}.mode", spec.mode, "coupled with method lookahead, which verifies trees")
    return LookaheadDrafter(spec.lookahead_window, spec.lookahead_ngram, spec.lookahead_guesses)
