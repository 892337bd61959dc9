"""`WaitingQueue`: sequences that do not run, in the order in which they will. Owns the order and the ageing.

Sorted by (rank, arrival). Where ranks differ, a sequence can be overtaken by later ones; after `max_overtaking`
times its rank becomes minus infinity, so waiting is bounded (I-18). Called by the scheduler alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from headrace.core.sequence import Sequence

ORDER = attrgetter("order")


class WaitingQueue:
    """A sorted list; `queue[0]` is the next to run."""

    def __init__(self, max_overtaking: int) -> None:
        self.max_overtaking = max_overtaking
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __getitem__(self, index: int) -> Sequence:
        return self._seqs[index]

    @property
    def least_rank(self) -> float:
        """Of those that wait; infinity if nobody does."""
        return self._seqs[0].rank if self._seqs else float("inf")

    def add(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=ORDER)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        del self._seqs[bisect_left(self._seqs, seq.order, key=ORDER)]

    def count_overtaking(self, by: Sequence, passed_by: Callable[[Sequence], bool]) -> bool:
        """Note that `by` left before those that arrived earlier. True if that changed the order of the queue.

        Those that wait of their own accord (`passed_by`) are not overtaken.
        """
        aged = False
        for seq in self._seqs:
            if seq.arrival < by.arrival and not passed_by(seq):
                seq.num_overtaken += 1
                if seq.num_overtaken == self.max_overtaking:
                    seq.rank = float("-inf")
                    aged = True
        if aged:
            self._seqs.sort(key=ORDER)
        return aged
