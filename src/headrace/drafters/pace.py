"""`Pace`: how deep to draft for each sequence in each step, by what it measures: how many guesses are kept, what a step
of so many rows costs, and what the drafter costs. Not at all is an answer too.

The aim is tokens per second: (sequences + guesses kept) / (seconds of a step with their rows + seconds of drafting),
after SmartSpec (Liu et al. 2024, arXiv 2406.14066). A guess is worth a row if its chance of being kept is above a bar,
which is set where the aim is highest. Now and then a step is taken otherwise, to see whether that has become better;
what that costs is bounded by a share of all time. Is told seconds, and reads no clock. Called by
`drafters.speculator`.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

NEVER = 2.0
"""A bar that no chance reaches."""

MAX_POSITIONS = 16
"""Chances are told apart by position up to here."""
FADE = 0.92
"""Of a sequence's own counts, with each of its drafts."""
GLOBAL_FADE = 0.98
WEIGHT = 6.0
"""Drafts' worth of what is known of all others, in what is thought of one sequence."""
FIRST_CHANCE = 0.7
ANSWER_SHARE = 0.05
"""Of one question in what is known of all."""
LEAST_ANSWERS = 0.02
FIRST_TRIES = 2
"""Steps with guesses before anything is judged, and the sequences whose worth of rows they may have."""
MOST_AT_FIRST = 4
PROBE_SHARE = 0.008
"""Of all time, for trying what does not look best."""
PROBE_DEPTH = 3
LEAST_LOSS = 0.05
"""What trying is taken to cost at least, in steps."""
MAX_CREDIT_STEPS = 3.0
MAX_DEBT_STEPS = 25.0
ASKING_SHARE = 0.002
"""Of all time, for finding out that nobody is worth a guess."""
MAX_REST = 256
"""Steps without a question."""
SAMPLES = 3
"""Steps of about so many rows that tell what one costs."""
EVERY = 8
"""Steps between two looks at the whole, unless the load changes."""
MARGIN = 1.03
"""How much better drafting must look than none."""


class Costs:
    """Seconds of a step by its number of rows: averages that newer values displace, the faster the older they are, and
    straight lines between, never falling."""

    def __init__(self) -> None:
        # By bucket: seconds, how many were seen, and when the last was.
        self._seen: dict[int, tuple[float, int, int]] = {}
        self._now = 0
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._stale = True

    def add(self, num_rows: int, seconds: float) -> None:
        self._now += 1
        bucket = _bucket(num_rows)
        before, count, last = self._seen.get(bucket, (seconds, 0, self._now))
        # One slow step is an accident, several are news.
        told = min(max(seconds, 0.5 * before), 1.6 * before)
        share = max(1.0 / (count + 1), min(0.6, 1.0 - 0.9 ** (self._now - last)), 0.1)
        # Accidents make steps slow, never fast.
        now = before + share * (told - before) if count >= SAMPLES else min(before, seconds)
        self._seen[bucket] = now, count + 1, self._now
        self._stale = True

    def known(self, num_rows: int) -> bool:
        """Whether steps of about so many rows were seen often enough."""
        near = num_rows // 5
        return sum(count for rows, (_, count, _) in self._seen.items() if abs(rows - num_rows) <= near) >= SAMPLES

    def of(self, num_rows: float) -> float:
        """Seconds of a step of so many rows; 0 while nothing is known."""
        if self._stale:
            self._draw()
        rows, seconds = self._rows, self._seconds
        if not rows:
            return 0.0
        at = bisect_left(rows, num_rows)
        if at == 0:
            return seconds[0]
        if at < len(rows):
            share = (num_rows - rows[at - 1]) / (rows[at] - rows[at - 1])
            return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
        # Beyond what was seen: as steep as on the whole, or as little as is usual where weights are read anyway.
        slope = seconds[-1] * min(0.05, 0.6 / rows[-1])
        if len(rows) > 1:
            slope = max((seconds[-1] - seconds[0]) / (rows[-1] - rows[0]), 0.3 * slope)
        return seconds[-1] + slope * (num_rows - rows[-1])

    @property
    def most_rows(self) -> int:
        """The longest step seen."""
        return max(self._seen, default=0)

    def _draw(self) -> None:
        """Make it rise: neighbours that fall are averaged (pool adjacent violators), the oftener seen counting more."""
        pools: list[tuple[float, float, list[int]]] = []
        for rows in sorted(self._seen):
            seconds, count, _ = self._seen[rows]
            pool = seconds, float(min(count, 10)), [rows]
            while pools and pools[-1][0] > pool[0]:
                low, weight, members = pools.pop()
                total = weight + pool[1]
                pool = (low * weight + pool[0] * pool[1]) / total, total, [*members, *pool[2]]
            pools.append(pool)
        self._rows = [rows for _, _, members in pools for rows in members]
        self._seconds = [seconds for seconds, _, members in pools for _ in members]
        self._stale = False


class Chances:
    """How often a guess at each position was kept, given that those before it were."""

    __slots__ = ("kept", "tried")

    def __init__(self) -> None:
        self.kept = [0.0] * MAX_POSITIONS
        self.tried = [0.0] * MAX_POSITIONS

    def add(self, num_drafted: int, num_accepted: int, fade: float) -> None:
        kept, tried = self.kept, self.tried
        # What was not reached fades too: it was learnt when times were better.
        self.fade(fade)
        for place in range(min(num_drafted, num_accepted + 1, MAX_POSITIONS)):
            kept[place] += place < num_accepted
            tried[place] += 1.0

    def fade(self, share: float) -> None:
        self.kept[:] = [each * share for each in self.kept]
        self.tried[:] = [each * share for each in self.tried]


class Runs:
    """What is known of one sequence: its chances, and how deep it is worth drafting below the present bar."""

    __slots__ = ("chances", "depth", "last_told", "rates")

    def __init__(self) -> None:
        self.chances = Chances()
        self.rates: list[float] | None = None
        self.depth: int | None = None
        self.last_told = 0


class Pace:
    """A `Plan` by measurement.

    Args:
        num_drafts, num_nodes: the deepest draft, and its tokens over all branches.
        whole: a draft is made in full or not at all (its rows are no guesses alone).
    """

    def __init__(self, num_drafts: int, num_nodes: int, whole: bool = False) -> None:
        self.num_drafts = num_drafts
        self.num_nodes = max(num_nodes, num_drafts)
        self.whole = whole
        self.costs = Costs()
        self._drafting: dict[int, float] = {}
        self._all = Chances()
        self._runs: dict[int, Runs] = {}
        self._bar = 0.0
        self._gain = 1.0
        # One that goes deeper than the others lets them all wait for the drafter.
        self._limit = num_drafts
        # Rows of guesses in a step.
        self._room = 0
        self._credit = 0.0
        self._base = 0
        self._beside = 0
        self._last_base = 1
        self._step = 0
        self._looked = -EVERY
        # The first step is a plain one, so that it is known what drafting is better than.
        self._rested = -EVERY
        self._num_planned = 0
        self._num_stepped = self._num_tried = 0
        self._was_drafting = self._rests_on = False
        # The sequence that is tried out (its id + 1), and what that costs; what a token is worth.
        self._probing = 0
        self._num_probes = 0
        self._probe_loss = self._probe_step = 0.0
        self._token_seconds = 0.0
        # Whether only that is drafted for, and what drafting is thought to cost then; what planning costs a sequence.
        self._trying = False
        self._trying_seconds = 0.0
        self._asking = 0.0
        # Of questions, those that a drafter has an answer to.
        self._answered = 1.0

    def nodes(self, depth: int) -> int:
        """Tokens of a draft of some depth, over all branches."""
        return self.num_nodes if self.whole else max(depth, -(-self.num_nodes * depth // self.num_drafts))

    def plan(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """For each (sequence id, the deepest that is of use) how deep to draft; 0: not at all."""
        self._step += 1
        base = max(self._base, len(wanted))
        early = self._step <= EVERY
        if early or self._step - self._looked >= EVERY or abs(base - self._last_base) > 0.2 * self._last_base:
            self._look(wanted, base)
        self._probing = 0
        self._trying = False
        depths = [0] * len(wanted)
        if self._bar < NEVER:
            if self._rests(base):
                return depths
            depths = [min(most, self._depth(seq_id)) for seq_id, most in wanted]
            self._trim(depths)
        self._probe(wanted, depths, base)
        self._num_planned = sum(self.nodes(depth) for depth in depths if depth)
        return depths

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Of a draft of so many tokens (in depth), so many were kept."""
        if num_drafted < 1:
            return
        runs = self._runs.get(seq_id)
        if runs is None:
            runs = self._runs[seq_id] = Runs()
        runs.chances.add(num_drafted, num_accepted, FADE)
        runs.rates = runs.depth = None
        runs.last_told = self._step
        self._all.add(num_drafted, num_accepted, GLOBAL_FADE)
        if self._probing == seq_id + 1:
            # What it earned is given back: where things have changed, the next try need not wait.
            self._credit += min(self._probe_loss, num_accepted * self._token_seconds)
            self._probing = 0
            self._looked = self._step - EVERY

    def stepped(self, num_rows: int, num_seqs: int, seconds: float, num_steps: int = 1) -> None:
        """A step of so many rows and sequences took as long, the last of `num_steps`."""
        if num_rows < 1 or not 0.0 < seconds < math.inf:
            return
        # The first prompt also pays for memory that is touched for the first time, and the first step after a draft for
        # what the drafter has put into the caches: one without guesses is to be as if there had been none.
        cold = num_steps == 1 and self._was_drafting and not self._num_planned
        if not cold and (self._num_stepped or num_rows == num_seqs):
            self.costs.add(num_rows, seconds)
        self._was_drafting = self._num_planned > 0
        if self._probe_step:
            # What it took beyond what was thought, as far as that is no accident.
            self._credit -= min(max(0.0, seconds - self._probe_step), self._probe_step)
            self._probe_step = 0.0
        self._num_stepped += 1
        self._num_tried += self._num_planned > 0
        # What is there without drafts: sequences, and the prompts that are computed beside them.
        # A prompt in one step alone is gone in the next.
        beside = num_rows - self._num_planned - num_seqs
        self._base = num_seqs + max(0, min(beside, self._beside))
        self._beside = beside
        self._num_planned = 0
        self._credit = min(
            self._credit + PROBE_SHARE * seconds * min(num_steps, MAX_REST + 1), MAX_CREDIT_STEPS * seconds
        )

    def asked(self, num_seqs: int, seconds: float) -> None:
        """To plan for so many sequences took as long, whether they are drafted for or not."""
        if 0.0 <= seconds < math.inf:
            before = self._asking or seconds / num_seqs
            self._asking = before + 0.15 * (min(seconds / num_seqs, 4.0 * before + 1e-6) - before)

    def rest(self, num_seqs: int) -> int:
        """For how many steps of so many sequences nobody need ask, where nobody is worth a guess just now: so many that
        asking, which takes its time, has its share of it."""
        plain = self.costs.of(num_seqs)
        if self._bar < NEVER or not plain:
            return 0
        return min(MAX_REST, int(self._asking * num_seqs / (ASKING_SHARE * plain)))

    def drafted(self, num_seqs: int, depth: int, seconds: float, is_behind: bool = False, num_empty: int = 0) -> None:
        """Drafts for so many sequences, of this depth at most, took as long; `num_empty` have none. `is_behind`: some
        of that was to catch up with what the sequences said while nobody asked."""
        if depth < 1 or num_seqs < 1 or not 0.0 <= seconds < math.inf:
            return
        self._answered += ANSWER_SHARE * (1.0 - num_empty / num_seqs - self._answered)
        if self._trying:
            more = max(0.0, seconds - self._trying_seconds)
            self._credit = max(self._credit - more, min(self._credit, -MAX_DEBT_STEPS * self.costs.of(self._base)))
        if is_behind:
            return
        bucket = num_seqs.bit_length()
        before = self._drafting.get(bucket, seconds / depth)
        told = min(seconds / depth, 4.0 * before + 1e-6)
        self._drafting[bucket] = before + 0.15 * (told - before)

    def drop(self, seq_id: int) -> None:
        """The sequence is no more."""
        self._runs.pop(seq_id, None)

    # -- the bar

    def _look(self, wanted: Sequence[tuple[int, int]], base: int) -> None:
        """Set the bar where tokens per second are most."""
        self._looked = self._step
        self._last_base = base
        for runs in self._runs.values():
            if self._step - runs.last_told > EVERY:
                # Who was found wanting is not held to it for ever: it may have been bad luck.
                runs.chances.fade(FADE)
                runs.rates = runs.depth = None
        plain = self.costs.of(base)
        if not plain or self._num_tried < FIRST_TRIES:
            self._room = self.num_nodes * min(len(wanted), MOST_AT_FIRST)
            self._set(0.0, 1.0, self.num_drafts)
            return
        # (chance for each row, rows, guesses kept, depth), the most useful first.
        offers: list[tuple[float, int, float, int]] = []
        for seq_id, most in wanted:
            kept, chance = 0.0, 1.0
            rates = self._rates(seq_id)
            before = 0
            for depth in range(1, min(most, self.num_drafts) + 1):
                chance *= rates[min(depth, MAX_POSITIONS) - 1]
                kept += chance
                if self.whole:
                    continue
                rows = self.nodes(depth)
                offers.append((chance / (rows - before), rows - before, chance, depth))
                before = rows
            if self.whole:
                offers.append((kept / self.num_nodes, self.num_nodes, kept, most))
        offers.sort(key=lambda offer: -offer[0])
        costs = self.costs
        num_tokens, rows, deepest = float(len(wanted)), base, 0
        per_depth = self._drafting_seconds(len(wanted))
        asking = self._asking * len(wanted)
        best, bar, gain, limit = MARGIN * num_tokens / plain, NEVER, 1.0, 0
        for place, (worth, more, kept, depth) in enumerate(offers):
            num_tokens += kept
            rows += more
            deepest = max(deepest, depth)
            if place + 1 < len(offers) and offers[place + 1][0] == worth:
                continue
            # Who was asked and has no answer has been asked nevertheless.
            rate = num_tokens / (costs.of(rows) + (deepest * per_depth + asking) / max(self._answered, LEAST_ANSWERS))
            # No leap into the dark: what is far beyond all that was seen may cost anything.
            if rate > best and rows <= max(1.25 * costs.most_rows, base) + 8:
                best, gain, limit = rate, rate * plain / len(wanted), deepest
                self._room = rows - base
                # Where a row more earns what it costs; between the last that was taken and the next.
                least = rate * (costs.of(rows + 1) - costs.of(rows) + per_depth / len(wanted))
                following = offers[place + 1][0] if place + 1 < len(offers) else 0.0
                bar = max(min(least, worth), following * 1.001)
        self._set(bar, gain, limit)

    def _set(self, bar: float, gain: float, limit: int) -> None:
        if (bar, limit) != (self._bar, self._limit):
            for runs in self._runs.values():
                runs.depth = None
        self._bar, self._gain, self._limit = bar, gain, limit

    def _depth(self, seq_id: int) -> int:
        """How deep the guesses of a sequence are above the bar."""
        runs = self._runs.get(seq_id)
        if runs is None:
            runs = self._runs[seq_id] = Runs()
        if runs.depth is None:
            chance, found, before, kept = 1.0, 0, 0, 0.0
            rates = self._rates(seq_id)
            for depth in range(1, self._limit + 1):
                chance *= rates[min(depth, MAX_POSITIONS) - 1]
                kept += chance
                rows = self.nodes(depth)
                if not self.whole and chance / (rows - before) < self._bar * 0.999:
                    break
                found, before = depth, rows
            if self.whole and kept / self.num_nodes < self._bar * 0.999:
                found = 0
            runs.depth = found
        return runs.depth

    def _trim(self, depths: list[int]) -> None:
        """No more rows than were found to be worth it: the next may cost more. The deepest guesses go first."""
        rows = sum(self.nodes(depth) for depth in depths if depth)
        while rows > self._room:
            place = max(range(len(depths)), key=depths.__getitem__)
            depth = 0 if self.whole else depths[place] - 1
            rows -= self.nodes(depths[place]) - (self.nodes(depth) if depth else 0)
            depths[place] = depth

    def _rates(self, seq_id: int) -> list[float]:
        """The chance at each position, given those before: the sequence's own, leaning on that of all."""
        runs = self._runs.get(seq_id)
        if runs is not None and runs.rates is not None:
            return runs.rates
        every = self._all
        overall = (sum(every.kept) + WEIGHT * FIRST_CHANCE) / (sum(every.tried) + WEIGHT)
        own = overall
        if runs is not None:
            chances = runs.chances
            own = (sum(chances.kept) + WEIGHT * overall) / (sum(chances.tried) + WEIGHT)
        rates = []
        for place in range(min(self.num_drafts, MAX_POSITIONS)):
            usual = (every.kept[place] + WEIGHT * overall) / (every.tried[place] + WEIGHT)
            rate = min(0.995, usual * own / max(overall, 1e-3))
            if runs is not None:
                rate = (chances.kept[place] + WEIGHT * rate) / (chances.tried[place] + WEIGHT)
            rates.append(rate)
        if runs is not None:
            runs.rates = rates
        return rates

    # -- what drafting costs, and looking whether it has become worth it

    def _drafting_seconds(self, num_seqs: int) -> float:
        """Of a token's depth; of the number of sequences known that is nearest."""
        if not self._drafting:
            return 0.0
        bucket = num_seqs.bit_length()
        nearest = min(self._drafting, key=lambda known: abs(known - bucket))
        return self._drafting[nearest] * 2.0 ** max(0, bucket - nearest)

    def _rests(self, base: int) -> bool:
        """Whether this is to be a plain step, so that it is known what drafting is better than: the second of two."""
        if self._rests_on:
            self._rests_on = False
            return True
        since = self._step - self._rested
        loss = 2.0 * self.costs.of(base) * max(0.0, 1.0 - 1.0 / self._gain)
        if self.costs.known(base):
            if since <= EVERY or self._credit < loss:
                return False
            self._credit -= loss
        elif since <= 2:
            return False
        self._rested = self._step
        self._rests_on = self._num_tried > 0
        return True

    def _probe(self, wanted: Sequence[tuple[int, int]], depths: list[int], base: int) -> None:
        """Of those who do not draft, that one who has not for the longest time may if there is credit for it."""
        plain = self.costs.of(base)
        if self._num_tried < FIRST_TRIES or not wanted or self._credit < LEAST_LOSS * plain or all(depths):
            return
        idle = [place for place, each in enumerate(depths) if not each]
        # Mostly one sequence, some tokens deep: how good are guesses? Now and then several: what do rows cost?
        wide = self._num_probes % 4 == 3
        width = max(1, len(idle) // 4) if wide else 1
        depth = 1 if wide else PROBE_DEPTH
        depth = self.num_drafts if self.whole else min(depth, self.num_drafts)
        rows = base + sum(self.nodes(each) for each in depths if each)
        more = width * self.nodes(depth)
        self._trying = not any(depths)
        seconds = self._trying_seconds = depth * self._drafting_seconds(width) if self._trying else 0.0
        loss = max(self.costs.of(rows + more) - self.costs.of(rows) + seconds, LEAST_LOSS * plain)
        if self._credit < min(loss, 0.9 * MAX_CREDIT_STEPS * plain):
            return
        self._num_probes += 1
        self._credit -= loss
        self._probe_step = self.costs.of(rows + more)
        self._probe_loss = loss
        self._token_seconds = plain / len(wanted)
        for place in heapq.nsmallest(width, idle, key=lambda i: self._told(wanted[i][0])):
            seq_id, most = wanted[place]
            depths[place] = min(most, depth)
            self._probing = seq_id + 1 if width == 1 else 0
            self._runs.setdefault(seq_id, Runs()).last_told = self._step

    def _told(self, seq_id: int) -> int:
        runs = self._runs.get(seq_id)
        return runs.last_told if runs is not None else 0


def _bucket(num_rows: int) -> int:
    """Exact up to 32 rows, eighths of a power of two beyond."""
    if num_rows <= 32:
        return num_rows
    unit = 1 << (num_rows.bit_length() - 4)
    return (num_rows + unit // 2) // unit * unit
