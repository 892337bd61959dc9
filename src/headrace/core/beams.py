"""`BeamSearch`: the rules of a beam search, on ints and floats alone.

Told each step's likeliest continuations of each running beam, it says which of them run on, and keeps the answers that
have ended. The rules are those of transformers' `generate(num_beams=...)`, so that both give the same answers; groups
are those of Vijayakumar et al., "Diverse Beam Search" (arXiv:1610.02424). Sums are float64 and ties fall to the
better beam, then to the lower token id, so that a search depends on its numbers only. Knows no sequences and no
blocks; `core.searches` holds those.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

from headrace.protocol.beam import BeamSearchParams

Top = list[tuple[int, float]]
"""(token id, log-probability) pairs, likeliest first."""


class Child(NamedTuple):
    """A beam that runs on: the beam of the last step that it continues, by index, and the token."""

    parent: int
    token_id: int


class Ended(NamedTuple):
    """An answer: what it is ranked by, the plain sum of its log-probabilities, and the token ids without the prompt."""

    score: float
    total: float
    token_ids: list[int]


class _Continuation(NamedTuple):
    """Ordered by worth, the best first. `parent` counts over all running beams, from the best of each group."""

    minus_sum: float
    parent: int
    token_id: int
    total: float


@dataclass(slots=True)
class _Group:
    """One group: the sums of its running beams (with and without penalties for likeness), best first, and its answers,
    best first."""

    sums: list[float]
    totals: list[float]
    ended: list[Ended] = field(default_factory=list)
    closed: bool = False


class BeamSearch:
    """One search over answers of at most `max_tokens` tokens. It starts with the prompt as its one beam.

    Running beams are numbered group by group, in each from the best to the worst. `advance` takes them in that order,
    and gives the next ones in that order.
    """

    def __init__(self, params: BeamSearchParams, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.width = params.beam_width // params.num_beam_groups
        self.num_kept = params.num_kept(len(stop_ids))
        self.num_generated = 0
        # All groups start with the same beam, and each gets to see it.
        self.groups = [_Group([0.0], [0.0]) for _ in range(params.num_beam_groups)]

    @property
    def finished(self) -> bool:
        return all(group.closed for group in self.groups)

    def advance(self, tops: list[Top], token_ids: list[list[int]], num_prompt: int) -> list[Child]:
        """Take one step. `tops[i]` are the likeliest tokens after beam i, whose tokens so far are `token_ids[i]`, the
        first `num_prompt` of them the prompt. Returns the beams that run on; none when the search is over."""
        first_step = not self.num_generated
        self.num_generated += 1
        chosen: Counter[int] = Counter()
        children: list[Child] = []
        first = 0
        for group in self.groups:
            if group.closed:
                continue
            num = len(group.sums)
            best = self._best(group, tops[first : first + num], first, chosen)
            self._note_ends(group, best, token_ids, num_prompt)
            going = [c for c in best if c.token_id not in self.stop_ids][: self.width]
            chosen.update(c.token_id for c in going)
            if self.num_generated == self.max_tokens:
                going = []
            group.sums = [-c.minus_sum for c in going]
            group.totals = [c.total for c in going]
            group.closed = not going or self._is_decided(group)
            if not group.closed:
                children += [Child(c.parent, c.token_id) for c in going]
            first += 0 if first_step else num
        return children

    def answers(self) -> list[Ended]:
        """The answers so far, the best first, at most as many as were asked for."""
        found = [ended for group in self.groups for ended in group.ended]
        found.sort(key=_score, reverse=True)
        return found[: self.params.num_answers]

    def _best(self, group: _Group, tops: list[Top], first: int, chosen: Counter[int]) -> list[_Continuation]:
        penalty = self.params.diversity_penalty
        found = [
            _Continuation(-(logprob - penalty * chosen[token_id] + before), parent, token_id, logprob + total)
            for parent, (top, before, total) in enumerate(zip(tops, group.sums, group.totals, strict=True), first)
            for token_id, logprob in top
        ]
        return nsmallest(self.num_kept, found)

    def _note_ends(self, group: _Group, best: list[_Continuation], token_ids: list[list[int]], num_prompt: int) -> None:
        """Only the best `width` continuations may end; those behind them are there in case that many do."""
        full = self.num_generated == self.max_tokens
        for c in best[: self.width]:
            if full or c.token_id in self.stop_ids:
                answer = [*token_ids[c.parent][num_prompt:], c.token_id]
                group.ended.append(Ended(self._scored(-c.minus_sum, self.num_generated), c.total, answer))
        group.ended.sort(key=_score, reverse=True)
        del group.ended[self.width :]

    def _is_decided(self, group: _Group) -> bool:
        """Whether the group's running beams need not be looked at any more."""
        if len(group.ended) < self.width:
            return False
        mode = self.params.early_stopping
        if mode is True:
            return True
        longest = mode == "never" and self.params.length_penalty > 0
        best_possible = self._scored(group.sums[0], self.max_tokens if longest else self.num_generated)
        return best_possible <= group.ended[-1].score

    def _scored(self, total: float, num_tokens: int) -> float:
        return float(total / num_tokens**self.params.length_penalty)


def _score(ended: Ended) -> float:
    return ended.score
