"""`Pace`: decides how many tokens to draft for each sequence in each step, and when to draft none.

One rule: of all draft tokens that could be made, the likeliest are taken, as many as make

    (sequences + expected accepted tokens) / (step seconds with these rows + drafting seconds)

greatest (goodput, after SmartSpec, Liu et al. 2024, arXiv 2406.14066). If none at all is best, the engine rests. From
time to time the other choice is tried, so that the estimates stay true; a fixed share of all time is spent so at most.
A drafter that needs only tokens is tried on text that is known already, which costs no rows.
All inputs are measurements handed in by `drafters.speculator`; no clock is read here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

SHARE = (
    0.005  # Greatest share of all time that is spent on tries of the other choice, looks back and decisions to rest.
)
LOOK_SHARE = 0.004  # The part of it for looks back, where the drafter has them.
SPARE = 0.5  # Steps' time that may be saved up for them.
MARGIN = (
    1.05  # Drafting must look this much better than none: prices err by some per cent, and the best of many is chosen.
)
EVERY = 8  # Steps for which a decision holds: making one takes longer than a look-up.
SAMPLES = 9  # Measurements that count for one number of rows: enough to outweigh disturbances.
FEW = 3  # Fewer measurements of a number of rows are doubted:
DOUBT, DOUBT_EVERY = 0.7, 32  # such a price sinks by this factor, once in so many steps.
WINDOW = 256  # Measurements after which one is forgotten, if there is a newer one: the machine's speed changes.
CHANGE = 1.25  # Where most measurements are off by this factor, the machine has become slower or faster.
FADE = 0.95  # Weight of past acceptances at each new draft: the last 20 or so count.
WEIGHT = 2.0  # Weight, in drafts, of the other sequences' rates in the estimate of one. With looks back it is 1.
FIRST_RATE = 0.5  # Acceptance of a drafter without measurements and without looks back: good enough to be tried.
FIRST_WEIGHT = 0.25  # Weight, in sequences, of that rate.
PROBE_DEPTH = 1  # Tokens drafted for one sequence while resting: the cheapest draft that shows a rise of acceptance.
LEAST_HOPE = (
    0.5  # Accepted tokens that looks back promise, at least, where a draft is tried at a price that is too high.
)
MAX_REST = 2048  # Most steps between two tries, however much the last one lost.
MIN_REST = 32  # The same after the first that lost; after the next, eight times as many.
MAX_LOOK_REST = 64  # The same between two looks back: repeating text is found within some dozens of tokens.
FIRST_LOOKS = 20e-6, 1e-6  # Seconds of a look back, and of the first one for each token, until they are measured.
FIRST_PLANS = 200e-6, 50e-6  # Seconds of a decision, and of one to go on resting.


def believed(price: float, seconds: float) -> float:
    """Return the new price of an action that took `seconds`. Disturbances make it slower, never faster: a longer time
    is believed bit by bit."""
    return min(seconds, 1.25 * price)


class Curve:
    """Seconds as a function of a count (rows, sequences), from measurements: straight lines between, never falling.

    Beyond the greatest count the line goes on with the slope from half of it on."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._values: dict[int, float] = {}
        self._ratios: deque[float] = deque(maxlen=SAMPLES)
        self._num_added, self._is_drawn, self._counts, self._seconds = 0, True, np.zeros(1), np.zeros(1)

    def add(self, count: int, seconds: float) -> None:
        self._num_added += 1
        # Exact below 16, in eighths of a power of two beyond.
        unit = 1 << max(0, count.bit_length() - 4)
        bucket = (count + unit // 2) // unit * unit
        usual = self._values.get(bucket, 0.0)
        if usual > 0.0:
            self._ratios.append(seconds / usual)
        if len(self._ratios) == SAMPLES and not 1.0 / CHANGE < (ratio := sorted(self._ratios)[SAMPLES // 2]) < CHANGE:
            for key, samples in self._samples.items():
                self._samples[key] = deque(((place, value * ratio) for place, value in samples), SAMPLES)
                self._values[key] *= ratio
            self._ratios.clear()
        samples = self._samples.setdefault(bucket, deque(maxlen=SAMPLES))
        samples.append((self._num_added, seconds))
        recent = sorted(value for place, value in samples if self._num_added - place < WINDOW)
        # Disturbances make steps slower, never faster: the lower third counts.
        self._values[bucket], self._is_drawn = recent[len(recent) // 3], False

    def doubt(self, factor: float) -> None:
        """Believe less in what was measured once or twice, which may have been an accident, so that it is tried again:
        such values sink by `factor`, down to the line of those that were measured more often."""
        firm = [key for key in self._values if len(self._samples[key]) >= FEW]
        if not firm:
            return
        line = self._line(firm)
        for key in self._values.keys() - set(firm):
            usual = float(np.interp(key, *line))
            if key > min(firm) and usual < self._values[key]:
                self._values[key], self._is_drawn = max(usual, factor * self._values[key]), False

    def _line(self, keys: Iterable[int]) -> F64:
        """Return the counts and the seconds [2, N] of the line through the values of `keys`."""
        # More rows never take less time.
        points: list[tuple[int, float]] = []
        for key in sorted(keys, reverse=True):
            points.append((key, min(self._values[key], points[-1][1] if points else math.inf)))
        most, high = points[0]
        half, low = next((point for point in points if 2 * point[0] <= most), points[-1])
        if half < most:
            points.insert(0, (10 * most, high + 9 * most * (high - low) / (most - half)))
        return np.array(points[::-1], np.float64).T

    def knows(self, count: int) -> bool:
        """Whether a count within a fifth of `count` was measured."""
        return any(abs(key - count) <= count // 5 for key in self._values)

    def at(self, counts: float | NDArray[Any]) -> F64:
        """Return the seconds at each of `counts`; 0 without measurements."""
        if not self._is_drawn:
            (self._counts, self._seconds), self._is_drawn = self._line(self._values), True
        return np.asarray(np.interp(counts, self._counts, self._seconds))


class Pace:
    """Depths by measurement.

    Args:
        num_drafts, num_nodes: the deepest draft, and its tokens over all branches.
        whole: a draft is made in full or not at all (the drafter needs the outcome of all its nodes).
        looks_back: the drafter's guesses are compared with known text (`Drafter.looks_back`), so that none is tried on
            a sequence of which nothing is known.
    """

    def __init__(self, num_drafts: int, num_nodes: int, whole: bool = False, looks_back: bool = False) -> None:
        self.num_drafts, self.num_nodes, self.whole = num_drafts, max(num_nodes, num_drafts), whole
        self.looks_back = looks_back
        self.step_seconds, self.draft_seconds = Curve(), Curve()
        # Of each sequence [2, 1 + num_drafts]: how often there was a draft, and the token at each depth was accepted;
        # how often there could be one, and the token was tried since all before it were accepted.
        self._counts = dict[int, F64]()
        # The same of sequences that have ended, each of which has a weight of at most 1.
        self._past = np.zeros((2, 1 + num_drafts))
        self._past[1, :2] = FIRST_WEIGHT
        self._past[0, :2] = (0.0, 0.0) if looks_back else (FIRST_WEIGHT, FIRST_WEIGHT * FIRST_RATE)
        self._weight = 1.0 if looks_back else WEIGHT
        # The current decision: its step, the step that ends it, sequences, depths, and speed relative to plain steps.
        self._step = self._chosen_step = self._until = self._changed_step = self._num_seqs = self._doubt_step = 0
        self.depths, self._known, self._gain = dict[int, int](), frozenset[int](), 1.0
        self._is_awake = self._is_limited = self._is_plains_turn = self._was_easy = False
        # Seconds that may be spent on tries, less than 0 where more were spent; the same of looks back; plain steps
        # still to take; seconds lost by the current try, and the most steps to rest after it.
        self._credit, self._look_credit, self._num_plain = 0.0, 0.0, 0
        self._share, self._look_share = (SHARE - LOOK_SHARE, LOOK_SHARE) if looks_back else (SHARE, 0.0)
        self._look_prices, self._plan_prices, self._has_hope = list(FIRST_LOOKS), list(FIRST_PLANS), False
        self._lost: float | None = None
        self._most_rest = MIN_REST
        self._had_drafts, self._has_drafted, self._most_rows = False, False, 0

    def nodes(self, depth: int) -> int:
        """Return the tokens of a draft of some depth, over all branches."""
        return self.num_nodes if self.whole else max(depth, -(-self.num_nodes * depth // self.num_drafts))

    # -- what was measured ---------------------------------------------------------------------------------------

    def stepped(self, step_id: int, num_seqs: int, num_rows: int, num_draft_rows: int, seconds: float) -> None:
        """Note the `seconds` of step `step_id` for `num_rows` rows of `num_seqs` sequences, draft tokens included."""
        # The first step without drafts after one with them finds the caches full of the drafter's data.
        is_cold, self._had_drafts = self._had_drafts and not num_draft_rows, num_draft_rows > 0
        num_rested, self._step = step_id - self._step - 1, step_id
        self._most_rows = max(self._most_rows, num_draft_rows)
        # Steps with prompts are not measured: few of their rows need logits.
        if num_rows == num_seqs + num_draft_rows and not is_cold and 0.0 < seconds < math.inf:
            self.step_seconds.add(num_rows, seconds)
        usual = float(self.step_seconds.at(num_seqs))
        if 0.0 < seconds < math.inf:
            passed = num_rested * usual + seconds
            self._credit = min(self._credit + self._share * passed, SPARE * usual)
            self._look_credit = min(self._look_credit + self._look_share * passed, SPARE * usual)
        if self._lost is not None:
            self._lost += float(self.step_seconds.at(num_seqs + num_draft_rows)) - usual

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Note that `num_accepted` tokens of a draft `num_drafted` tokens deep were accepted."""
        self._count(seq_id, num_drafted, num_accepted)
        if self._lost is not None:
            self._lost -= num_accepted * float(self.step_seconds.at(self._num_seqs)) / self._num_seqs

    def answered(self, seq_id: int, has_draft: bool) -> None:
        """Note whether there was a draft for a sequence."""
        counts = self._counts_of(seq_id)
        counts[:, 0] *= FADE
        counts[:, 0] += has_draft, 1.0

    def drafted(self, num_seqs: int, depth: int, seconds: float, is_behind: bool = False) -> None:
        """Note that drafts for `num_seqs` sequences, at most `depth` deep, took `seconds`.

        `is_behind`: the drafter had tokens to catch up with, which is no part of the usual time.
        """
        if not 0.0 <= seconds < math.inf:
            return
        # The first call finds nothing in the caches, and is no measure.
        is_first, self._has_drafted = not self._has_drafted, True
        if not is_behind and not is_first:
            self.draft_seconds.add(num_seqs, seconds / depth)
        if self._lost is not None:
            # Only the usual time counts: neither a disturbed step's nor the time to catch up.
            self._lost += seconds if is_behind else depth * float(self.draft_seconds.at(num_seqs))

    def foretold(self, seq_id: int, num_guessed: int, num_right: int) -> None:
        """Note a guess about text that is known: of its `num_guessed` tokens the first `num_right` are right."""
        self.answered(seq_id, num_guessed > 0)
        if num_guessed:
            self._count(seq_id, num_guessed, num_right)
            self._has_hope |= num_right > 1

    def looked(self, num_learnt: int, seconds: float) -> None:
        """Note the time of a look back, for which the drafter read the first `num_learnt` tokens of a sequence, or 0 if
        it knows the sequence."""
        if 0.0 <= seconds < math.inf:
            unit, is_first = max(1, num_learnt), num_learnt > 0
            self._look_prices[is_first] = believed(self._look_prices[is_first], seconds / unit)
            self._pay_look(self._look_prices[is_first] * unit)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended; its acceptance is expected of new ones."""
        self.depths.pop(seq_id, None)
        counts = self._counts.pop(seq_id, None)
        if counts is not None:
            self._past = FADE * self._past + self._weighed(counts)

    # -- what is decided -----------------------------------------------------------------------------------------

    def current(self, seq_ids: Sequence[int]) -> Mapping[int, int] | None:
        """Return the depth for each sequence that gets a draft in this step; None if that has to be decided anew, by
        `plan`. `seq_ids`: all that run."""
        num_seqs = len(seq_ids)
        if self._num_plain or not self.step_seconds.knows(num_seqs):
            self._num_plain = max(0, self._num_plain - 1)
            return {}
        if self._lost is not None or self._step >= self._until:
            return None
        if not self._is_awake:
            if 2 * num_seqs >= self._num_seqs:
                return self.depths
            self._has_hope = True
            return None
        holds = abs(num_seqs - self._num_seqs) <= num_seqs // 5 and self._known.issuperset(seq_ids)
        return self.depths if holds else None

    @property
    def may_look(self) -> bool:
        """Whether there is time for a look back."""
        return self.looks_back and self._look_credit >= 0.0

    def stays_asleep(self, num_seqs: int) -> bool:
        """Whether looks back showed nothing that makes another decision than to rest possible."""
        if not self.looks_back or self._is_awake or self._has_hope or self._lost is not None:
            return False
        self._num_seqs, self._chosen_step, self._was_easy = num_seqs, self._step, True
        return True

    def plan(self, limits: Sequence[tuple[int, int]], seq_ids: Sequence[int]) -> Mapping[int, int]:
        """Decide. Return the depth for each sequence that gets a draft in this step. `limits`: (sequence id, greatest
        useful depth) of those that may; `seq_ids`: all that run."""
        num_seqs = len(seq_ids)
        usual = float(self.step_seconds.at(num_seqs))
        has_lost = self._lost is not None and self._end_try()
        self._has_hope = self._was_easy = False
        if (num_steps := self._step - self._doubt_step) >= DOUBT_EVERY:
            self._doubt_step = self._step
            for curve in (self.step_seconds, self.draft_seconds):
                curve.doubt(DOUBT ** (num_steps / DOUBT_EVERY))
        self._known, self._num_seqs = frozenset(seq_ids), num_seqs
        was_awake, self.depths = self._is_awake, {}
        hopeful = self._choose(limits, num_seqs) if limits else None
        self._chosen_step = self._step
        if self._is_awake != was_awake:
            self._changed_step = self._step
        # The first decisions after a change are reviewed sooner, and those that lack measurements at once.
        self._until = self._step + (1 if self._is_limited else min(EVERY, 1 + self._step - self._changed_step))
        if self._credit < 0.0 or not limits or has_lost:
            return self.depths
        if self._is_awake:
            self._is_plains_turn = not self._is_plains_turn
            if hopeful is not None and not self._is_plains_turn:
                # One of the sequences without a draft gets one.
                more = float(self.step_seconds.at(num_seqs + 1)) - usual + float(self.draft_seconds.at(1))
                self._pay(more * max(hopeful.values()))
                return {**self.depths, **hopeful}
            if self._step - self._changed_step >= EVERY:
                # Two plain steps, of which the second is measured.
                self._num_plain = 1
                self._pay(2.0 * (1.0 - 1.0 / self._gain) * usual)
                return {}
        elif hopeful is not None:
            self._lost = 0.0
            return hopeful
        return self.depths

    def rest(self, seconds: float) -> int:
        """Return for how many steps there is nothing to draft. The decision took `seconds`, which count too."""
        if self._is_awake or self._lost is not None or self._num_plain or not self._num_seqs:
            return 0
        if self._chosen_step == self._step:
            usual, was_easy = float(self.step_seconds.at(self._num_seqs)), self._was_easy
            price = self._plan_prices[was_easy] = believed(self._plan_prices[was_easy], seconds)
            if self.looks_back:
                self._pay_look(price)
            else:
                self._pay(price)
            credit, share = (self._look_credit, self._look_share) if self.looks_back else (self._credit, self._share)
            num_steps = math.ceil(-credit / (share * usual)) if usual > 0.0 else 0
            self._until = self._step + min(max(EVERY, num_steps), MAX_REST)
        return max(0, self._until - self._step - 1)

    def _pay(self, seconds: float, most_rest: int = MAX_REST) -> None:
        """Spend `seconds`, after which tries wait until they are `SHARE` of all time, but at most `most_rest` steps."""
        debt = self._share * most_rest * float(self.step_seconds.at(self._num_seqs))
        self._credit = min(self._credit, max(self._credit - seconds, -debt))

    def _pay_look(self, seconds: float) -> None:
        debt = self._look_share * MAX_LOOK_REST * float(self.step_seconds.at(self._num_seqs))
        self._look_credit = min(self._look_credit, max(self._look_credit - seconds, -debt))

    def _end_try(self) -> bool:
        """End a try, and return whether it lost: then it is paid for. One that gained is followed by another."""
        lost, self._lost = self._lost or 0.0, None
        if lost < 0.0:
            self._credit, self._most_rest = max(self._credit, 0.0), MIN_REST
            return False
        self._pay(lost, self._most_rest)
        # One measurement may be an accident: a long rest follows several tries that lost.
        self._most_rest = min(8 * self._most_rest, MAX_REST)
        return True

    def _choose(self, limits: Sequence[tuple[int, int]], num_seqs: int) -> dict[int, int] | None:
        """Choose the depth for each sequence, by the rule of this module, one level of one sequence after the other.
        Return the depths of a try, None if none is worth it."""
        rates = self._rates([seq_id for seq_id, _ in limits])
        most = np.array([most for _, most in limits])
        chances = np.cumprod(rates[:, 1:], axis=1) * (np.arange(self.num_drafts) < most[:, None])
        num_expected = chances.sum(axis=1)
        rows = np.diff([0] + [self.nodes(depth + 1) for depth in range(self.num_drafts)])
        if self.whole:
            chances, rows = chances.sum(axis=1, keepdims=True), rows[:1]
        usual = float(self.step_seconds.at(num_seqs))
        # A sequence whose tokens are not worth the time to look for them is left out.
        answered, price = rates[:, 0], float(self.draft_seconds.at(len(limits))) / len(limits)
        chances *= (answered * num_expected * usual >= price * num_seqs)[:, None]
        # A depth is taken after all lesser ones, also where a tree grows unevenly.
        worth = np.minimum.accumulate(chances / rows, axis=1)
        order = np.argsort(-worth, axis=None, kind="stable")
        places, levels = np.divmod(order, len(rows))
        depth_of_level = self.num_drafts if self.whole else 1
        deepest = np.maximum.accumulate((levels + 1) * depth_of_level)
        share = answered[places]
        seconds = self.step_seconds.at(num_seqs + np.cumsum(rows[levels] * share))
        seconds = seconds + deepest * self.draft_seconds.at(np.cumsum(levels == 0))
        speeds = (num_seqs + np.cumsum(chances.flat[order] * share)) / seconds
        # At most about twice the rows of any step before: beyond that nothing is measured. The first draft is a try,
        # unless looks back show what it is worth.
        first = max(4, self.nodes(1)) if self.looks_back else 0
        num_known = int((np.cumsum(rows[levels]) <= 2 * self._most_rows + first).sum())
        best = int(np.argmax(speeds))
        self._gain, self._is_limited = float(speeds[best]) * usual / num_seqs, best >= num_known
        self._is_awake = self._gain > MARGIN and num_known > 0
        best = min(best, num_known - 1)
        num_levels = np.bincount(places[: best + 1], minlength=len(limits)) * depth_of_level
        depths = {seq_id: int(num) for (seq_id, _), num in zip(limits, num_levels, strict=True) if num}
        if self._is_awake:
            self.depths = depths
            others = [i for i, (seq_id, _) in enumerate(limits) if seq_id not in depths]
            if self.looks_back or not others:
                return None
            return self._try([limits[i] for i in others], (num_expected * answered)[others])
        if self.looks_back and (num_expected * answered).max() < LEAST_HOPE:
            return None
        # Where it is a near thing, the best choice is tried itself, so that its price is measured.
        return depths if depths and self._gain > 2.0 - MARGIN else self._try(limits, num_expected * answered)

    def _try(self, limits: Sequence[tuple[int, int]], num_expected: F64) -> dict[int, int] | None:
        """Return the depth of a draft for one sequence to try: the one that may yet be the best. `num_expected`:
        accepted tokens of each."""
        tries = [self._counts[seq_id][1, 1] if seq_id in self._counts else 0.0 for seq_id, _ in limits]
        hopes = (num_expected * (np.array(tries) + self._weight) + 1.0) / (np.array(tries) + self._weight + 1.0)
        seq_id, most = limits[int(np.argmax(hopes))]
        return {seq_id: min(most, self.num_drafts if self.whole else PROBE_DEPTH)}

    def _count(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        counts = self._counts_of(seq_id)
        # Depths that were not reached fade too, and are tried again when the first ones get better.
        counts[:, 1:] *= FADE
        counts[0, 1 : 1 + num_accepted] += 1.0
        counts[1, 1 : 1 + min(num_drafted, num_accepted + 1)] += 1.0

    def _counts_of(self, seq_id: int) -> F64:
        return self._counts.setdefault(seq_id, np.zeros((2, 1 + self.num_drafts)))

    def _weighed(self, counts: F64) -> F64:
        """Return counts of sequences with the same rates and a weight of each sequence below 1, however long it is."""
        return counts / (counts[..., 1:, :] + self._weight)

    def _rates(self, seq_ids: Sequence[int]) -> F64:
        """Return the share of requests with a draft, and of tokens accepted at each depth, as expected of each sequence
        [sequences, 1 + num_drafts]. What little is known of a sequence is filled up with the rates of all."""
        every = self._past
        if self._counts:
            every = every + self._weighed(np.stack(list(self._counts.values()))).sum(axis=0)
        # A depth that was seldom reached is taken to be as good as the one before.
        shares, tries = every.tolist()
        priors = [shares[0] / tries[0], shares[1] / tries[1]]
        for num_right, num_tried in zip(shares[2:], tries[2:], strict=True):
            priors.append((num_right + FIRST_WEIGHT * priors[-1]) / (num_tried + FIRST_WEIGHT))
        # Rejections may be chance, or past: without new drafts they come to count less.
        for seq_id in seq_ids:
            counts, least = self._counts_of(seq_id), 4.0 * self._weight
            if counts[1, 1] > least:
                counts *= max(least / counts[1, 1], FADE ** ((self._step - self._chosen_step) / EVERY))
        counts = np.stack([self._counts[seq_id] for seq_id in seq_ids])
        return (counts[:, 0] + self._weight * np.array(priors)) / (counts[:, 1] + self._weight)
