"""`BeamSearch`: the rules of a beam search, on ints and floats alone.

After each step it chooses the beams to continue from the likeliest continuations of each running beam, and keeps the
answers that have ended. The rules are transformers' (`generate(num_beams=...)`), so that both give the same answers;
groups follow Vijayakumar et al., "Diverse Beam Search" (arXiv:1610.02424). Sums are float64 and ties fall to the better
beam, then to the lower token id, so that a search depends on its numbers only. Knows no sequences and no blocks; called
by `core.beams.searches` alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

from headrace.protocol.beam import BeamSearchParams

Top = tuple[tuple[int, float], ...]
"""(token id, log-probability) pairs, likeliest first."""


class Child(NamedTuple):
    """A beam of the next step: the index of its parent among the beams of the last step, and its new token."""

    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """An answer: its score, the plain sum of its log-probabilities, and the token ids without the prompt."""

    score: float
    total: float
    token_ids: list[int]


class _Continuation(NamedTuple):
    """A beam and one next token; sorts with the best first. `parent` is the index among all running beams."""

    minus_sum: float
    parent: int
    token_id: int
    total: float


@dataclass(slots=True)
class _Group:
    """One group: the sums of its running beams (with and without diversity penalties), best first, and its answers,
    best first."""

    sums: list[float]
    totals: list[float]
    answers: list[Hypothesis] = field(default_factory=list)
    closed: bool = False


class BeamSearch:
    """One search over answers of at most `max_tokens` tokens. It starts with the prompt as its one beam.

    Running beams are numbered group by group, in each from the best to the worst. `advance` takes them in that order
    and returns the next ones in that order.
    """

    def __init__(self, params: BeamSearchParams, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.width = params.beam_width // params.num_beam_groups
        self.num_kept = params.num_kept(len(stop_ids))
        self.num_generated = 0
        # All groups start with the same beam, the prompt.
        self.groups = [_Group([0.0], [0.0]) for _ in range(params.num_beam_groups)]

    @property
    def finished(self) -> bool:
        return all(group.closed for group in self.groups)

    def advance(self, tops: list[Top], token_ids: list[list[int]], num_prompt: int) -> list[Child]:
        """Advance by one token. `tops[i]` are the likeliest tokens after beam i, and `token_ids[i]` all its tokens so
        far, of which `num_prompt` are the prompt. Returns the beams that run on; none when the search is over."""
        first_step = not self.num_generated
        self.num_generated += 1
        num_chosen: Counter[int] = Counter()
        children: list[Child] = []
        first = 0
        for group in self.groups:
            if group.closed:
                continue
            num = len(group.sums)
            best = self._best(group, tops[first : first + num], first, num_chosen)
            self._note_ends(group, best, token_ids, num_prompt)
            beams = [c for c in best if c.token_id not in self.stop_ids][: self.width]
            num_chosen.update(c.token_id for c in beams)
            if self.num_generated == self.max_tokens:
                beams = []
            group.sums = [-c.minus_sum for c in beams]
            group.totals = [c.total for c in beams]
            group.closed = not beams or self._is_decided(group)
            if not group.closed:
                children += [Child(c.parent, c.token_id) for c in beams]
            first += 0 if first_step else num
        return children

    def answers(self) -> list[Hypothesis]:
        """Return the answers so far, the best first, at most `num_answers` of them."""
        answers = [answer for group in self.groups for answer in group.answers]
        answers.sort(key=_score, reverse=True)
        return answers[: self.params.num_answers]

    def _best(self, group: _Group, tops: list[Top], first: int, num_chosen: Counter[int]) -> list[_Continuation]:
        penalty = self.params.diversity_penalty
        continuations = [
            _Continuation(-(logprob - penalty * num_chosen[token_id] + before), parent, token_id, logprob + total)
            for parent, (top, before, total) in enumerate(zip(tops, group.sums, group.totals, strict=True), first)
            for token_id, logprob in top
        ]
        return nsmallest(self.num_kept, continuations)

    def _note_ends(self, group: _Group, best: list[_Continuation], token_ids: list[list[int]], num_prompt: int) -> None:
        """Keep the answers among the best `width` continuations. Those behind them replace the ones that end."""
        full = self.num_generated == self.max_tokens
        for c in best[: self.width]:
            if full or c.token_id in self.stop_ids:
                answer = [*token_ids[c.parent][num_prompt:], c.token_id]
                group.answers.append(Hypothesis(self._scored(-c.minus_sum, self.num_generated), c.total, answer))
        group.answers.sort(key=_score, reverse=True)
        del group.answers[self.width :]

    def _is_decided(self, group: _Group) -> bool:
        """Whether the group's running beams cannot improve its answers any more."""
        if len(group.answers) < self.width:
            return False
        mode = self.params.early_stopping
        if mode is True:
            return True
        longest = mode == "never" and self.params.length_penalty > 0
        best_possible = self._scored(group.sums[0], self.max_tokens if longest else self.num_generated)
        return best_possible <= group.answers[-1].score

    def _scored(self, total: float, num_tokens: int) -> float:
        return float(total / num_tokens**self.params.length_penalty)


def _score(answer: Hypothesis) -> float:
    return answer.score
