"""SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the longest suffix seen before follows again, as
often as it did; long matches are trusted further than short ones.

A suffix automaton (Blumer et al. 1985) with counts takes in a token in constant time on average and knows every suffix
at once. Each sequence has one over its prompt and its answer. One over the answers of finished requests is kept only if
`num_cached_requests` allows it: what others were told then shows in the speed of a request, never in its text.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from headrace.drafters.base import F32, Context, Draft, Target
from headrace.protocol.speculation import SpeculativeConfig

MAX_SEQ_TOKENS = 2**16
"""Tokens that one sequence's automaton holds, half a kilobyte each; a longer one begins again."""
MAX_TOKENS = 2**18
"""Tokens that those of all sequences hold; who guessed longest ago is forgotten."""
MAX_SHARED_TOKENS = 2**17
"""Tokens of finished requests' answers."""
MAX_NEW_TOKENS = 2048
"""Tokens taken in at one call: 10 ms. A long prompt is learnt over some steps."""
MAX_COUNTED = 64
MAX_TRIED = 4
"""Suffixes, each shorter than the one before, from which the best guess is chosen."""
MAX_BRANCHES = 8


class Automaton:
    """All suffixes of the sequences taken in. State 0 is the empty one; a state stands for the substrings that end at
    the same places: `length` of the longest, `link` to the state of the longest that ends at more, `count` of places.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.num_tokens = 0

    def extend(self, last: int, token: int) -> int:
        """The state after `last` is followed by `token`, which is taken in."""
        self.num_tokens += 1
        known = self.next[last].get(token)
        if known is not None and self.length[known] == self.length[last] + 1:
            current = known
        elif known is not None:
            current = self._split(last, token, known)
        else:
            current = self._state({}, 0, self.length[last] + 1, 0)
            at = last
            while at >= 0 and token not in self.next[at]:
                self.next[at][token] = current
                at = self.link[at]
            if at >= 0:
                known = self.next[at][token]
                same = self.length[known] == self.length[at] + 1
                self.link[current] = known if same else self._split(at, token, known)
        at = current
        for _ in range(MAX_COUNTED):
            if at <= 0:
                break
            self.count[at] += 1
            at = self.link[at]
        return current

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state and length of the longest suffix of (`length` tokens that led to `state`) + `token`."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token not in self.next[state]:
            return 0, 0
        return self.next[state][token], length + 1

    def _split(self, at: int, token: int, known: int) -> int:
        """Give the substrings of `known` that are as long as `at` and `token` a state of their own."""
        made = self._state(dict(self.next[known]), self.link[known], self.length[at] + 1, self.count[known])
        self.link[known] = made
        while at >= 0 and self.next[at].get(token) == known:
            self.next[at][token] = made
            at = self.link[at]
        return made

    def _state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1


class History:
    """A sequence's own automaton, and where its end is in those of the others."""

    def __init__(self) -> None:
        self.own = Automaton()
        self.last = 0
        self.num_taken = 0
        self.answer: list[int] = []
        self.places: dict[int, tuple[int, int]] = {}


class Guess:
    """A tree of tokens with the share of the branches that each had; `score` is the number expected to be right."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.score = 0.0


class SuffixDrafter:
    """Guesses by counts along the longest known suffixes.

    A guess is as deep as `factor` times its match (of which `max_match` tokens count), as long as it has at least
    `min_share` of the branches. `num_cached_requests`: finished ones whose answers help others.
    """

    feature_layers: tuple[int, ...] | None = None

    def __init__(self, max_match: int, factor: float, min_share: float, num_cached_requests: int) -> None:
        self._max_match = max_match
        self._factor = factor
        self._min_share = min_share
        self._num_cached = num_cached_requests
        self._histories: OrderedDict[int, History] = OrderedDict()
        self._num_tokens = 0
        self._room = 0
        # Two generations, of which the older is forgotten when the younger is full.
        self._shared: list[Automaton] = []
        self._num_young = 0

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        self._room = MAX_NEW_TOKENS
        return [self._draft(context) for context in contexts]

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        """Not asked for."""

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        """Nothing is learnt of it: the tokens tell all."""

    def drop(self, seq_id: int) -> None:
        history = self._forget(seq_id)
        if history is not None and self._num_cached:
            self._share(history.answer)

    def close(self) -> None:
        self._histories.clear()
        self._shared.clear()
        self._num_tokens = 0

    def _forget(self, seq_id: int) -> History | None:
        history = self._histories.pop(seq_id, None)
        self._num_tokens -= history.own.num_tokens if history is not None else 0
        return history

    def _draft(self, context: Context) -> Draft:
        history = self._histories.get(context.seq_id)
        if history is None or history.num_taken > len(context.tokens) or history.own.num_tokens >= MAX_SEQ_TOKENS:
            self._forget(context.seq_id)
            history = self._histories[context.seq_id] = History()
            # A sequence longer than that begins again with its last half.
            history.num_taken = max(0, len(context.tokens) - MAX_SEQ_TOKENS // 2)
        self._histories.move_to_end(context.seq_id)
        if not self._take(history, context):
            return Draft([])
        own, best = history.own, Guess()
        state = own.link[history.last]
        for shared, at, length in ((own, state, own.length[max(state, 0)]), *self._matches(history)):
            for _ in range(MAX_TRIED):
                if at <= 0:
                    break
                guess = self._grow(shared, at, length, context)
                if guess.score > best.score:
                    best = guess
                at = shared.link[at]
                length = shared.length[at]
        chain = all(parent == i - 1 for i, parent in enumerate(best.parents))
        return Draft(best.token_ids, None if chain else best.parents)

    def _take(self, history: History, context: Context) -> bool:
        """Take in tokens that are new; -> whether that was all of them."""
        tokens, start = context.tokens, history.num_taken
        num_new = min(len(tokens) - start, self._room)
        self._room -= num_new
        self._num_tokens += num_new
        while self._num_tokens > MAX_TOKENS and len(self._histories) > 1:
            self._forget(next(iter(self._histories)))
        for place in range(start, start + num_new):
            token = tokens[place]
            history.last = history.own.extend(history.last, token)
            if self._num_cached and place >= context.num_prompt:
                history.answer.append(token)
            history.num_taken += 1
        for automaton in self._shared:
            # Of what was before the automaton began, the last few tokens are as good as all.
            first = start if id(automaton) in history.places else max(0, history.num_taken - 2 * self._max_match)
            state, length = history.places.get(id(automaton), (0, 0))
            for place in range(first, history.num_taken):
                state, length = automaton.step(state, length, tokens[place])
            history.places[id(automaton)] = state, length
        return history.num_taken == len(tokens)

    def _matches(self, history: History) -> list[tuple[Automaton, int, int]]:
        return [(automaton, *history.places[id(automaton)]) for automaton in self._shared]

    def _grow(self, automaton: Automaton, state: int, length: int, context: Context) -> Guess:
        """The likeliest continuations of `state`, whose match has `length` tokens; the likeliest node first."""
        guess = Guess()
        most = min(context.num_drafts, int(self._factor * min(length, self._max_match)))
        wide = context.num_nodes > context.num_drafts
        # (less share, how far from the front, token, state, node before, depth)
        open_nodes: list[tuple[float, int, int, int, int, int]] = []
        order = 0
        share, at, node, depth = 1.0, state, -1, 0
        while True:
            if depth < most:
                following = automaton.next[at]
                counts = [(automaton.count[to], token, to) for token, to in following.items()]
                total = sum(count for count, _, _ in counts)
                for count, token, to in heapq.nlargest(MAX_BRANCHES if wide else 1, counts):
                    if share * count >= self._min_share * total and total:
                        order += 1
                        heapq.heappush(open_nodes, (-share * count / total, order, token, to, node, depth + 1))
            if not open_nodes or len(guess.token_ids) >= context.num_nodes:
                return guess
            less, _, token, at, parent, depth = heapq.heappop(open_nodes)
            share, node = -less, len(guess.token_ids)
            guess.token_ids.append(token)
            guess.parents.append(parent)
            guess.score += share

    def _share(self, answer: list[int]) -> None:
        if not self._shared or self._num_young >= max(1, self._num_cached // 2):
            self._renew()
        last = 0
        for token in answer:
            if self._shared[0].num_tokens >= MAX_SHARED_TOKENS // 2:
                self._renew()
                last = 0
            last = self._shared[0].extend(last, token)
        self._num_young += 1

    def _renew(self) -> None:
        self._shared = [Automaton(), *self._shared[:1]]
        self._num_young = 0
        kept = {id(automaton) for automaton in self._shared}
        for history in self._histories.values():
            history.places = {key: place for key, place in history.places.items() if key in kept}


def make(spec: SpeculativeConfig, target: Target) -> SuffixDrafter:
    """Needs nothing of the model."""
    return SuffixDrafter(
        spec.suffix_decoding_max_tree_depth,
        spec.suffix_decoding_max_spec_factor,
        spec.suffix_decoding_min_token_prob,
        spec.suffix_decoding_max_cached_requests,
    )
