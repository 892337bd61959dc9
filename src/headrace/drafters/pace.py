"""`Pace`: decides how many tokens to draft for each sequence in each step, and when to draft none.

One rule: of all draft tokens that could be made, the likeliest are taken, as many as make

    (sequences + expected accepted tokens) / (step seconds with these rows + drafting seconds)

greatest (goodput, after SmartSpec, Liu et al. 2024, arXiv 2406.14066). If none at all is best, the engine rests. From
time to time the other choice is tried, so that the estimates stay true; at most a fixed share of all time is lost so.
All inputs are measurements handed in by `drafters.speculator`; no clock is read here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

SHARE = 0.01  # Greatest share of all time that tries of the other choice may lose.
MARGIN = 1.03  # Drafting must look this much better than none: estimates err by some per cent.
EVERY = 8  # Steps for which a decision holds: making one takes longer than a look-up.
SAMPLES = 9  # Measurements that count for one number of rows: enough to outweigh disturbances.
WINDOW = 256  # Measurements after which one is forgotten: the machine's speed changes.
CHANGE = 1.25  # Where most measurements are off by this factor, the machine has become slower or faster.
FADE = 0.95  # Weight of past acceptances at each new draft: the last 20 or so count.
WEIGHT = 4.0  # Weight, in drafts, of all sequences' rate in the estimate of one: a new sequence starts from it.
FIRST_RATE = 0.7  # Acceptance of a drafter without measurements: good enough to be tried.
PROBE_DEPTH = 3  # Tokens drafted for one sequence while resting: cheap, and a rise of acceptance shows.
MAX_REST = 2048  # Most steps between two probes, however much the last one lost.


class Curve:
    """Seconds as a function of a count (rows, sequences), from measurements: straight lines between, never falling."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._ratios: deque[float] = deque(maxlen=SAMPLES)
        self._num_added, self._counts, self._seconds = 0, np.zeros(1), np.zeros(1)

    def add(self, count: int, seconds: float) -> None:
        self._num_added += 1
        # Exact below 16, in eighths of a power of two beyond.
        unit = 1 << max(0, count.bit_length() - 4)
        bucket = (count + unit // 2) // unit * unit
        if bucket in self._samples and (usual := float(self.at(count))) > 0.0:
            self._ratios.append(seconds / usual)
        ratio = sorted(self._ratios)[SAMPLES // 2] if len(self._ratios) == SAMPLES else 1.0
        if not 1.0 / CHANGE < ratio < CHANGE:
            for key, samples in self._samples.items():
                self._samples[key] = deque(((place, value * ratio) for place, value in samples), SAMPLES)
            self._ratios.clear()
        self._samples.setdefault(bucket, deque(maxlen=SAMPLES)).append((self._num_added, seconds))
        points: list[tuple[int, float]] = []
        for key in sorted(self._samples, reverse=True):
            recent = sorted(value for place, value in self._samples[key] if self._num_added - place < WINDOW)
            if not recent:
                del self._samples[key]
                continue
            # Disturbances make steps slower, never faster: the lower third counts, and more rows never take less time.
            points.append((key, min(recent[len(recent) // 3], points[-1][1] if points else math.inf)))
        (least, low), (most, high) = points[-1], points[0]
        if least < most:
            # Beyond the greatest count the line goes on with the slope of the whole curve.
            points.insert(0, (10 * most, high + 9 * most * (high - low) / (most - least)))
        self._counts, self._seconds = np.array(points[::-1], np.float64).T

    def knows(self, count: int) -> bool:
        """Whether a count within a fifth of `count` was measured."""
        return any(abs(key - count) <= count // 5 for key in self._samples)

    def at(self, counts: float | NDArray[Any]) -> F64:
        """Return the seconds at each of `counts`; 0 without measurements."""
        return np.asarray(np.interp(counts, self._counts, self._seconds))


class Pace:
    """Depths by measurement.

    Args:
        num_drafts, num_nodes: the deepest draft, and its tokens over all branches.
        whole: a draft is made in full or not at all (the drafter needs the outcome of all its nodes).
    """

    def __init__(self, num_drafts: int, num_nodes: int, whole: bool = False) -> None:
        self.num_drafts, self.num_nodes, self.whole = num_drafts, max(num_nodes, num_drafts), whole
        self.step_seconds, self.draft_seconds, self.plan_seconds = Curve(), Curve(), Curve()
        # [2, num_drafts]: how often the token at each depth was accepted, and tried since all before it were accepted.
        self._all, self._counts = np.zeros((2, num_drafts)), dict[int, F64]()
        # The current decision: its step, sequences, likeliest sequence, depths, and speed relative to plain steps.
        self._step = self._chosen_step = self._num_seqs = self._likeliest = 0
        self._depths, self._gain = dict[int, int](), 1.0
        # The step of the next try of the other choice; plain steps still to take; seconds lost by the current probe.
        self._try_step = self._num_plain = 0
        self._lost: float | None = None
        self._had_drafts, self._most_rows = False, 0
        self._num_requested = self._num_made = 1.0

    def nodes(self, depth: int) -> int:
        """Return the tokens of a draft of some depth, over all branches."""
        return self.num_nodes if self.whole else max(depth, -(-self.num_nodes * depth // self.num_drafts))

    def stepped(self, step_id: int, num_seqs: int, num_rows: int, num_draft_rows: int, seconds: float) -> None:
        """Note the `seconds` of step `step_id` for `num_rows` rows of `num_seqs` sequences, draft tokens included."""
        # The first step without drafts after one with them finds the caches full of the drafter's data.
        is_cold, self._had_drafts = self._had_drafts and not num_draft_rows, num_draft_rows > 0
        self._step, self._most_rows = step_id, max(self._most_rows, num_draft_rows)
        # Steps with prompts are not measured: few of their rows need logits.
        if num_rows == num_seqs + num_draft_rows and not is_cold and 0.0 < seconds < math.inf:
            self.step_seconds.add(num_rows, seconds)
        if self._lost is not None:
            self._lost += float(self.step_seconds.at(num_seqs + num_draft_rows) - self.step_seconds.at(num_seqs))

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Note that `num_accepted` tokens of a draft `num_drafted` tokens deep were accepted."""
        for counts in (self._all, self._counts.setdefault(seq_id, np.zeros((2, self.num_drafts)))):
            # Depths that were not reached fade too, and are tried again when the first ones get better.
            counts *= FADE
            counts[0, :num_accepted] += 1.0
            counts[1, : min(num_drafted, num_accepted + 1)] += 1.0
        if self._lost is not None:
            self._lost -= num_accepted * float(self.step_seconds.at(self._num_seqs)) / self._num_seqs

    def drafted(self, num_seqs: int, num_made: int, depth: int, seconds: float, is_behind: bool = False) -> None:
        """Note that drafts for `num_seqs` sequences, at most `depth` deep, took `seconds`; `num_made` are not empty.

        `is_behind`: the drafter had tokens to catch up with, which is no part of the usual time.
        """
        if not 0.0 <= seconds < math.inf:
            return
        self._num_requested = FADE * self._num_requested + num_seqs
        self._num_made = max(FADE * self._num_made + num_made, 0.01)
        if not is_behind:
            self.draft_seconds.add(num_seqs, seconds / depth)
        if self._lost is not None:
            # Only the usual time counts: neither a disturbed step's nor the time to catch up.
            self._lost += seconds if is_behind else depth * float(self.draft_seconds.at(num_seqs))

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self._counts.pop(seq_id, None)

    def plan(self, limits: Sequence[tuple[int, int]], num_seqs: int) -> list[int]:
        """Return the depth to draft (0: none) for each (sequence id, greatest useful depth); `num_seqs` run in all."""
        if not limits or self._num_plain or not self.step_seconds.knows(num_seqs):
            self._num_plain = max(0, self._num_plain - 1)
            return [0] * len(limits)
        holds = all(seq_id in self._depths for seq_id, _ in limits) and abs(num_seqs - self._num_seqs) <= num_seqs // 5
        if not holds or self._lost is not None or self._step - self._chosen_step >= EVERY:
            was_drafting = any(self._depths.values())
            self._choose(limits, num_seqs)
            if any(self._depths.values()) != was_drafting:
                self._try_step = self._step + EVERY
            elif self._lost is not None:
                self._try_after(self._lost / float(self.step_seconds.at(num_seqs)))
            self._lost = None
        if self._step < self._try_step:
            return [min(most, self._depths[seq_id]) for seq_id, most in limits]
        if any(self._depths.values()):
            # Two plain steps, of which the second is measured.
            self._num_plain = 1
            self._try_after(2.0 * (1.0 - 1.0 / self._gain))
            return [0] * len(limits)
        self._lost = 0.0
        depth = self.num_drafts if self.whole else PROBE_DEPTH
        return [min(most, depth) if seq_id == self._likeliest else 0 for seq_id, most in limits]

    def rest(self, seconds: float) -> int:
        """Return for how many steps there is nothing to draft. The decision took `seconds`, which count too."""
        if not self._depths or any(self._depths.values()) or self._lost is not None or self._num_plain:
            return 0
        self.plan_seconds.add(self._num_seqs, seconds)
        num_lost = float(self.plan_seconds.at(self._num_seqs) / self.step_seconds.at(self._num_seqs))
        self._try_step = min(self._try_step + int(num_lost / SHARE), self._step + MAX_REST)
        return max(0, self._try_step - self._step - 1)

    def _try_after(self, num_lost: float) -> None:
        """Put off the next try until the time of `num_lost` steps is `SHARE` of all; after a gain not at all."""
        num_steps = max(EVERY, math.ceil(num_lost / SHARE)) if num_lost >= 0.0 else 0
        self._try_step = self._step + min(num_steps, MAX_REST)

    def _choose(self, limits: Sequence[tuple[int, int]], num_seqs: int) -> None:
        """Choose the depth for each sequence, by the rule of this module, one level of one sequence after the other."""
        chances = self._chances(limits)
        rows = np.diff([0] + [self.nodes(depth + 1) for depth in range(self.num_drafts)])
        if self.whole:
            chances, rows = chances.sum(axis=1, keepdims=True), rows[:1]
        # A depth is taken after all lesser ones, also where a tree grows unevenly.
        worth = np.minimum.accumulate(chances / rows, axis=1)
        order = np.argsort(-worth, axis=None, kind="stable")
        places, levels = np.divmod(order, len(rows))
        depth_of_level = self.num_drafts if self.whole else 1
        deepest = np.maximum.accumulate((levels + 1) * depth_of_level)
        num_rows = np.cumsum(rows[levels])
        # Calls of the drafter that give no draft take time too.
        drafting = self.draft_seconds.at(np.cumsum(levels == 0)) * self._num_requested / self._num_made
        seconds = self.step_seconds.at(num_seqs + num_rows) + deepest * drafting
        speeds = (len(limits) + np.cumsum(chances.flat[order])) / seconds
        # At most about twice the rows of any step before: beyond that nothing is measured.
        speeds[num_rows > 2 * self._most_rows + max(4, self.nodes(1))] = 0.0
        best = int(np.argmax(speeds))
        self._gain = float(speeds[best] * self.step_seconds.at(num_seqs)) / len(limits)
        num_levels = np.bincount(places[: best + 1], minlength=len(limits)) * (self._gain > MARGIN)
        self._depths = {seq_id: int(num) * depth_of_level for (seq_id, _), num in zip(limits, num_levels, strict=True)}
        self._likeliest = limits[places[0]][0]
        self._chosen_step, self._num_seqs = self._step, num_seqs

    def _chances(self, limits: Sequence[tuple[int, int]]) -> F64:
        """Return the probability that the token at each depth is accepted [sequences, num_drafts]; 0 at depths beyond
        the limits."""
        mean = (self._all[0].sum() + WEIGHT * FIRST_RATE) / (self._all[1].sum() + WEIGHT)
        priors = (self._all[0] + WEIGHT * mean) / (self._all[1] + WEIGHT)
        counts = np.stack([self._counts.setdefault(seq_id, np.zeros((2, self.num_drafts))) for seq_id, _ in limits])
        chances = np.cumprod((counts[:, 0] + WEIGHT * priors) / (counts[:, 1] + WEIGHT), axis=1)
        for seq_id, _ in limits:
            # Few rejections may be chance: the counts of a sequence that is not drafted for lose weight with time too.
            self._counts[seq_id] *= FADE ** ((self._step - self._chosen_step) / EVERY)
        most = np.array([most for _, most in limits])
        return chances * (np.arange(self.num_drafts) < most[:, None])
