"""SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): the draft is the most frequent text after earlier occurrences
of the longest possible suffix; long matches give deeper drafts than short ones.

A suffix automaton (Blumer et al. 1985) with counts adds a token in constant time on average and has every suffix at
once. Each sequence has one over its prompt and its answer. One over the answers of finished requests is kept only if
`num_cached_requests` allows it: these answers then change the speed of other requests, and never their text, except
under rejection sampling.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from headrace.drafters.base import Context, Drafter, Target
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft

MAX_SEQ_TOKENS = 2**16
"""Most tokens of one sequence's automaton, half a kilobyte each; a longer sequence gets a new one."""
MAX_TOKENS = 2**18
"""Most tokens in the automata of all sequences; beyond it the longest unused automaton is dropped."""
MAX_SHARED_TOKENS = 2**17
"""Most tokens of finished requests' answers."""
MAX_NEW_TOKENS = 2048
"""Most tokens added in one call: 10 ms. A long prompt is added over several steps."""
MAX_COUNTED = 64
MAX_TRIED = 4
"""Number of suffixes, each shorter than the one before, among which the best draft is chosen."""
MAX_BRANCHES = 8


class Automaton:
    """All suffixes of the added sequences. State 0 is the empty one; a state stands for the substrings that end at
    the same places: `length` of the longest, `count` of the places, `link` to the state of the longest suffix that ends
    at more places.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.num_tokens = 0

    def extend(self, last: int, token: int) -> int:
        """Add `token` after state `last`. Return the new state."""
        self.num_tokens += 1
        successor = self.next[last].get(token)
        if successor is not None and self.length[successor] == self.length[last] + 1:
            current = successor
        elif successor is not None:
            current = self._split(last, token, successor)
        else:
            current = self._state({}, 0, self.length[last] + 1, 0)
            at = last
            while at >= 0 and token not in self.next[at]:
                self.next[at][token] = current
                at = self.link[at]
            if at >= 0:
                successor = self.next[at][token]
                is_next = self.length[successor] == self.length[at] + 1
                self.link[current] = successor if is_next else self._split(at, token, successor)
        at = current
        for _ in range(MAX_COUNTED):
            if at <= 0:
                break
            self.count[at] += 1
            at = self.link[at]
        return current

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the longest suffix of (`length` tokens that led to `state`) + `token`."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token not in self.next[state]:
            return 0, 0
        return self.next[state][token], length + 1

    def _split(self, at: int, token: int, state: int) -> int:
        """Split a new state off `state`: for its substrings of at most `length[at]` + 1 tokens. Return the new one."""
        clone = self._state(dict(self.next[state]), self.link[state], self.length[at] + 1, self.count[state])
        self.link[state] = clone
        while at >= 0 and self.next[at].get(token) == state:
            self.next[at][token] = clone
            at = self.link[at]
        return clone

    def _state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1


class History:
    """A sequence's automaton, and the states of its end in the automata of finished requests."""

    def __init__(self) -> None:
        self.automaton = Automaton()
        self.last = 0
        self.num_added = 0
        self.answer: list[int] = []
        self.places: dict[int, tuple[int, int]] = {}


class SuffixDrafter(Drafter):
    """Drafts by counts along the longest suffixes.

    A draft is as deep as `factor` times its match (of which `max_match` tokens count), as long as it has at least
    `min_share` of the branches. `num_cached_requests`: finished ones whose answers help others.
    """

    looks_back = True

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
        self._num_tokens -= history.automaton.num_tokens if history is not None else 0
        return history

    def _draft(self, context: Context) -> Draft:
        history = self._histories.get(context.seq_id)
        if history is None or history.num_added > len(context.tokens) or history.automaton.num_tokens >= MAX_SEQ_TOKENS:
            self._forget(context.seq_id)
            history = self._histories[context.seq_id] = History()
            # A sequence longer than that begins again with its last half.
            history.num_added = max(0, len(context.tokens) - MAX_SEQ_TOKENS // 2)
        self._histories.move_to_end(context.seq_id)
        if not self._take(history, context):
            return Draft([])
        automaton, best, most_expected = history.automaton, Draft([]), 0.0
        state = automaton.link[history.last]
        matches = [(shared, *history.places[id(shared)]) for shared in self._shared]
        for shared, at, length in ((automaton, state, automaton.length[max(state, 0)]), *matches):
            for _ in range(MAX_TRIED):
                if at <= 0:
                    break
                draft, num_expected = self._grow(shared, at, length, context)
                if num_expected > most_expected:
                    best, most_expected = draft, num_expected
                at = shared.link[at]
                length = shared.length[at]
        return best

    def _take(self, history: History, context: Context) -> bool:
        """Add the new tokens. Return whether all of them are in."""
        tokens, start = context.tokens, history.num_added
        num_new = min(len(tokens) - start, self._room)
        self._room -= num_new
        self._num_tokens += num_new
        while self._num_tokens > MAX_TOKENS and len(self._histories) > 1:
            self._forget(next(iter(self._histories)))
        for place in range(start, start + num_new):
            token = tokens[place]
            history.last = history.automaton.extend(history.last, token)
            if self._num_cached and place >= context.num_prompt:
                history.answer.append(token)
            history.num_added += 1
        for automaton in self._shared:
            # The last few tokens before the automaton's begin give the same match as all.
            first = start if id(automaton) in history.places else max(0, history.num_added - 2 * self._max_match)
            state, length = history.places.get(id(automaton), (0, 0))
            for place in range(first, history.num_added):
                state, length = automaton.step(state, length, tokens[place])
            history.places[id(automaton)] = state, length
        return history.num_added == len(tokens)

    def _grow(self, automaton: Automaton, state: int, length: int, context: Context) -> tuple[Draft, float]:
        """Return the likeliest continuations of `state`, whose match has `length` tokens, the likeliest node first; and
        the expected number of correct ones."""
        draft, num_expected = Draft([]), 0.0
        most = min(context.num_drafts, int(self._factor * min(length, self._max_match)))
        wide = context.num_nodes > context.num_drafts
        # (minus the share, order of insertion, token, state, node before, depth)
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
            if not open_nodes or len(draft.token_ids) >= context.num_nodes:
                return draft, num_expected
            less, _, token, at, parent, depth = heapq.heappop(open_nodes)
            share, node = -less, len(draft.token_ids)
            draft.token_ids.append(token)
            draft.parents.append(parent)
            num_expected += share

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
        ids = {id(automaton) for automaton in self._shared}
        for history in self._histories.values():
            history.places = {key: place for key, place in history.places.items() if key in ids}


def make(spec: SpeculativeConfig, target: Target) -> SuffixDrafter:
    """Make the drafter."""
    return SuffixDrafter(
        spec.suffix_decoding_max_tree_depth,
        spec.suffix_decoding_max_spec_factor,
        spec.suffix_decoding_min_token_prob,
        spec.suffix_decoding_max_cached_requests,
    )
