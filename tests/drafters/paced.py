"""A modelled world with a simulated clock for `Pace`: steps take the time of a formula, and draft tokens are accepted
by chance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.drafters.pace import Pace

Seconds = Callable[[int], float]


def processor(rows: int) -> float:
    """A CPU: weights are read anyway (30 ms), and 32 rows are as much work as that."""
    return max(0.030, 0.030 * rows / 32) + 0.0006 * rows


def accelerator(rows: int) -> float:
    """Rows cost nothing up to 256."""
    return 0.010 + max(0.0, 0.00002 * (rows - 256))


def small(rows: int) -> float:
    """A model so small that rows are all of it."""
    return 0.0004 + 0.00015 * rows


@dataclass
class World:
    """Sequences whose draft tokens are accepted with a chance each.

    `seconds` of a step by rows, `draft_seconds` for a token's depth of one sequence, `answers` the share of requests
    for which the drafter has a draft, `deciding` the seconds of a decision not to draft, `looking` those of a look back
    at one sequence. The clock is the formula's; measurements have noise, and an accident at times.
    """

    seconds: Seconds
    chances: list[float]
    draft_seconds: float = 0.0
    noise: float = 0.05
    answers: float = 1.0
    seed: int = 1
    clock: float = 0.0
    num_tokens: int = 0
    num_drafted: int = 0
    deciding: float = 0.0
    looking: float = 0.0
    num_looks: int = 0
    rest: int = 0
    step_id: int = 0
    depths: list[int] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.depths = [0] * len(self.chances)

    def step(self, pace: Pace, most: int) -> None:
        """One step as the engine takes it: while the pace rests it is not called."""
        num_seqs, depths = len(self.chances), self.depths
        num_draft_rows = sum(pace.nodes(depth) for depth in depths if depth)
        self.step_id += 1
        seconds = self.seconds(num_seqs + num_draft_rows)
        self.clock += seconds
        self.num_tokens += num_seqs
        if self.rest:
            self.rest -= 1
            return
        measured = seconds * (1.0 + self.noise * self.random.uniform(-1.0, 1.0))
        measured *= 3.0 if self.random.random() < 0.2 * self.noise else 1.0
        pace.stepped(self.step_id, num_seqs, num_seqs + num_draft_rows, num_draft_rows, measured)
        for seq_id, depth in enumerate(depths):
            num_accepted = self._num_right(seq_id, depth)
            self.num_tokens += num_accepted
            if depth:
                pace.verified(seq_id, depth, num_accepted)
        seq_ids = range(num_seqs)
        requests = pace.current(seq_ids)
        if requests is None:
            self._look_back(pace)
            stays = pace.stays_asleep(num_seqs)
            requests = {} if stays else pace.plan([(seq_id, most) for seq_id in seq_ids], seq_ids)
        self.depths = [0] * num_seqs
        if requests:
            for seq_id, depth in requests.items():
                has_draft = self.random.random() < self.answers
                self.depths[seq_id] = min(depth, most) if has_draft else 0
                pace.answered(seq_id, has_draft)
            drafting = max(requests.values()) * self.draft_seconds * len(requests) ** 0.5
            self.clock += drafting
            self.num_drafted += 1
            pace.drafted(len(requests), max(requests.values()), drafting)
        else:
            self.clock += self.deciding
            self.rest = pace.rest(self.deciding)

    def _look_back(self, pace: Pace) -> None:
        """Guesses about the last 8 tokens of the sequences without drafts, those first that have waited longest."""
        order = sorted(set(range(len(self.chances))) - set(pace.depths), key=lambda seq_id: self.seen.get(seq_id, 0))
        for seq_id in order:
            if not pace.may_look:
                return
            self.seen[seq_id] = self.step_id
            self.num_looks += 1
            self.clock += self.looking
            pace.foretold(seq_id, 8, self._num_right(seq_id, 8))
            pace.looked(0, self.looking)

    def _num_right(self, seq_id: int, most: int) -> int:
        num = 0
        while num < most and self.random.random() < self.chances[seq_id]:
            num += 1
        return num

    def run(self, pace: Pace, num_steps: int, most: int = 8) -> float:
        """Tokens per second of so many steps."""
        start, num_before = self.clock, self.num_tokens
        for _ in range(num_steps):
            self.step(pace, most)
        return (self.num_tokens - num_before) / (self.clock - start)

    def mean_depth(self, pace: Pace, num_steps: int) -> float:
        total = 0
        for _ in range(num_steps):
            self.step(pace, 8)
            total += sum(self.depths)
        return total / num_steps / len(self.chances)


def expected(seconds: Seconds, load: int, chance: float, depth: int, cost: float) -> float:
    """Tokens per second of a fixed depth, by the rule's formula."""
    num_accepted = sum(chance**place for place in range(depth + 1))
    return load * num_accepted / (seconds(load + load * depth) + depth * cost * math.sqrt(load))
