"""`Shares`: the policy "fair" for what runs. Each holder with requests may use an equal share, and none more for long.

Where 2 holders or more have requests, and not more of them than there are places, a share is an equal part of the
places among the running sequences, of each kind's blocks, of the log-probabilities of a step and of its tokens. What a
holder leaves unused others may use, until it claims it: the first requests of a holder that fit into its share start
before all others, and sequences of the holder that is farthest above its share give way to them, the last in the
queue's order first. A holder that is within its share never gives way, so two that want all get a half each, and then
disturb one another no more. So with k holders a request that fits into its holder's share starts within k + 1 steps.

Where steps overlap, none that would leave out a prompt is chosen, so that its holder has its part of each step.

A request that is larger than a share runs in what others leave. Knows sequences and numbers, and no clock. Called by
the scheduler alone, which preempts and starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.core.beams.searches import Searches
from headrace.core.queue import ORDER, WaitingQueue
from headrace.core.sequence import NEVER, Sequence
from headrace.core.tables import BlockTables, shareable

MAX_PREEMPTIONS = 2
"""For blocks that others lack. After these a sequence waits until it can run to its end (`Scheduler._admit`)."""
MAX_NUMBERS = 2**16
"""Log-probabilities that a step has of sampled tokens, and of prompts, unless one row has more."""


class Shares:
    """The shares of one scheduler, without effect unless it `is_fair`. `holders` counts the requests in the system.

    -1 log-probabilities are `vocab_size`.
    """

    def __init__(
        self,
        tables: BlockTables,
        searches: Searches,
        waiting: WaitingQueue[Sequence],
        max_num_seqs: int,
        vocab_size: int,
        is_fair: bool,
    ) -> None:
        self.holders: Counter[str] = Counter()
        self._tables, self._searches, self._waiting = tables, searches, waiting
        self._vocab_size, self._is_fair = vocab_size, is_fair
        # Places, log-probabilities of sampled tokens, and blocks of each kind.
        self._all = [max_num_seqs, MAX_NUMBERS, *(kind.pool.num_blocks for kind in tables.all_kinds)]
        # Blocks that are left once all claims run, for the copies that some of them begin with.
        self.num_spare = 0
        # What each holder may still compute in the step that is chosen: rows, and log-probabilities of prompts.
        self._rows: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def leave(self, seq: Sequence) -> None:
        """Note that a request has ended."""
        self.holders -= Counter([seq.request.tenant])

    @property
    def are_equal(self) -> bool:
        """Whether several holders have requests, and each can have a place."""
        return self._is_fair and 1 < len(self.holders) <= self._all[0]

    # -- who starts, and who gives way ---------------------------------------------------------------------------

    def claims(self, num_tokens: int) -> list[Sequence]:
        """Return the waiting sequences that fit into what their holders have left of their shares, in the queue's
        order: those of each holder have about an equal part of `num_tokens`."""
        share = self._share()
        part = dict.fromkeys(self.holders, num_tokens // len(self.holders))
        used: dict[str, list[int]] = {}
        passed: set[str | bytes] = set()
        claims: list[Sequence] = []
        for index in range(len(self._waiting)):
            seq = self._waiting[index]
            holder = seq.request.tenant
            # The siblings of a claim wait for it, and need less then.
            if holder in passed or seq.family in passed or self._tables.awaits_sibling(seq):
                continue
            before = used.get(holder) or self._usage(holder)
            used[holder] = [num + more for num, more in zip(before, self._need(seq), strict=True)]
            if seq.num_preemptions >= MAX_PREEMPTIONS or any(map(int.__gt__, used[holder], share)):
                passed.add(holder)
                continue
            passed |= {seq.family} - {b""}
            claims.append(seq)
            part[holder] -= len(seq.tokens)
            if part[holder] <= 0:
                passed.add(holder)
        return claims

    def victim(self, claims: Iterable[Sequence]) -> Sequence | None:
        """Return the sequence that has to give way so that there is room for all of `claims`; None if there is, or if
        no holder is above its share of what they lack."""
        usages = {holder: self._usage(holder) for holder in self.holders}
        totals = [sum(column) for column in zip(*usages.values(), *map(self._need, claims), strict=True)]
        self.num_spare = min(map(int.__sub__, self._all[2:], totals[2:]))
        for index, (num, share) in enumerate(zip(self._all, self._share(), strict=True)):
            holder = max(usages, key=lambda each: usages[each][index])
            if totals[index] > num and usages[holder][index] > share:
                return max((seq for seq in self._of(holder) if index != 1 or self._width(seq)), key=ORDER)
        return None

    def givers(self, candidates: list[Sequence]) -> list[Sequence]:
        """Return the sequences of which one has to give way where blocks lack: those of `candidates`, or else any, of
        the holder with the most blocks of the kind of which the fewest are left."""
        kinds = self._tables.all_kinds
        index = 2 + min(range(len(kinds)), key=lambda kind: kinds[kind].pool.num_available)
        holder = max(self.holders, key=lambda each: self._usage(each)[index])
        return [seq for seq in candidates if seq.request.tenant == holder] or self._of(holder)

    def fits(self, seq: Sequence) -> bool:
        """Whether a step has room for the log-probabilities of `seq` beside those of the running sequences."""
        width = self._width(seq)
        return not self._is_fair or not width or width + sum(map(self._width, self._searches.running)) <= MAX_NUMBERS

    # -- the tokens of a step ------------------------------------------------------------------------------------

    def begin_step(self, seqs: Iterable[Sequence], budget: int) -> None:
        """Share out `budget` tokens among the holders of `seqs`, which have more than one token to compute or are to
        start: equal parts, and what one does not need is for the others."""
        self._numbers = dict.fromkeys(self.holders, self._share()[1])
        demands: Counter[str] = Counter()
        for seq in seqs if self.are_equal else ():
            demands[seq.request.tenant] += len(seq.tokens) - seq.num_computed - seq.num_ahead
        self._rows = {}
        for num_done, (holder, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
            self._rows[holder] = rows = max(1, budget // (len(demands) - num_done))
            budget -= min(demand, rows)

    def most(self, seq: Sequence, start: int) -> int:
        """Return how many tokens of `seq` from `start` on this step may compute, by its holder's share. One row with
        log-probabilities of any number always may."""
        holder, width = seq.request.tenant, self._prompt_width(seq, start)
        rows = self._rows.get(holder, NEVER)
        if not width or not self._is_fair:
            return rows
        return min(rows, max(self._numbers[holder] // width, self._numbers[holder] == self._share()[1]))

    def take(self, seq: Sequence, start: int, length: int) -> int:
        """Count tokens that the step computes, and return how many."""
        holder = seq.request.tenant
        if holder in self._rows:
            self._rows[holder] -= length
        self._numbers[holder] -= length * self._prompt_width(seq, start)
        return length

    # -- numbers -------------------------------------------------------------------------------------------------

    def _share(self) -> list[int]:
        return [num // max(1, len(self.holders)) for num in self._all]

    def _of(self, holder: str) -> list[Sequence]:
        return [seq for seq in self._searches.running if seq.request.tenant == holder]

    def _usage(self, holder: str) -> list[int]:
        """Return how much of all the running sequences of a holder use. Blocks that they share count once, and those
        that they need for their known tokens count."""
        seqs, kinds = self._of(holder), self._tables.all_kinds
        tables = [[seq.states.values() if kind.is_state else seq.tables[kind.index] for seq in seqs] for kind in kinds]
        blocks = [len(set().union(*each) - {-1}) for each in tables]
        for seq in seqs:
            self._tables.promise(blocks, seq)
        num_absent = 0
        for search in self._searches.at_work() if self._searches.open else ():
            if search.live[0].request.tenant == holder:
                num_absent += search.num_absent
                blocks = self._searches.with_reserve(blocks, search) if search.pending else blocks
        return [len(seqs) + num_absent, sum(map(self._width, seqs)), *blocks]

    def _need(self, seq: Sequence) -> list[int]:
        """Return how much of all `seq` uses once it runs; no less than it really does."""
        has_sibling = seq.family in self._tables.families and seq.may_share and self._tables.is_plain
        num_shared = shareable(seq) // self._tables.pool.block_size if has_sibling else 0
        blocks = [kind.peak(seq, 0) - num_shared for kind in self._tables.all_kinds]
        search = self._searches.get(seq)
        if search is not None:
            blocks = self._searches.with_reserve(blocks, search)
        return [1 if search is None else search.width, self._width(seq), *blocks]

    def _width(self, seq: Sequence) -> int:
        """Return how many log-probabilities each sampled token of `seq` has, as far as they count: one sequence may
        always run."""
        return 0 if seq.is_beam else min(self._count(seq.params.logprobs), self._share()[1])

    def _prompt_width(self, seq: Sequence, start: int) -> int:
        return self._count(seq.params.prompt_logprobs) if start < seq.num_prompt - 1 else 0

    def _count(self, num: int | None) -> int:
        return 0 if num is None else 1 + (self._vocab_size if num < 0 else num)
