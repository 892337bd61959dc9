"""The order in which sequences wait: `WaitingQueue` keeps it, and `Ranks` gives each new request its place by policy.

The queue is sorted by (rank, arrival). Where ranks differ, later sequences can overtake an earlier one; after
`max_overtaking` times its rank becomes minus infinity, so waiting is bounded (I-18). Called by the scheduler, and by
the queue in front of a fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from headrace.protocol.step import Request

ORDER = attrgetter("order")
MAX_TENANTS = 4096
ANSWER = 256
"""Predicted tokens of an answer, where the front end predicts none and max_tokens is more."""


class Waiter(Protocol):
    """The attributes that the queue needs of a sequence, or of a request before it has a replica."""

    rank: float
    arrival: int
    num_overtaken: int

    @property
    def order(self) -> tuple[float, int]: ...


T = TypeVar("T", bound=Waiter)


class WaitingQueue(Generic[T]):
    """A sorted list of sequences that do not run; `queue[0]` is the next to run.

    Raises `ValueError` for a `max_overtaking` below 1.
    """

    def __init__(self, max_overtaking: int) -> None:
        if max_overtaking < 1:
            raise ValueError(f"max_overtaking must be at least 1, got {max_overtaking}")
        self.max_overtaking = max_overtaking
        self._seqs: list[T] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __getitem__(self, index: int) -> T:
        return self._seqs[index]

    @property
    def least_rank(self) -> float:
        """The smallest rank in the queue; infinity if the queue is empty."""
        return self._seqs[0].rank if self._seqs else float("inf")

    def add(self, seq: T) -> None:
        insort(self._seqs, seq, key=ORDER)

    def remove(self, seq: T) -> None:
        """Take out a sequence that is in the queue."""
        del self._seqs[bisect_left(self._seqs, seq.order, key=ORDER)]

    def count_overtaking(self, by: T, passed_by: Callable[[T], bool]) -> bool:
        """Count for each sequence that arrived before `by` that `by` left the queue first. Returns whether the order
        has changed.

        A sequence that waits for a sibling (`passed_by`) is not overtaken.
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


class Ranks:
    """The ranks of new requests under one policy; a smaller rank runs sooner.

    "fcfs": all ranks are equal, so arrival decides. "priority": the request's own number. "fair": each tenant in turn,
    by tokens of work, however many requests one of them sends (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM
    1996, section 2.1, with the least rank in the queue for the virtual time); with one tenant that is the order of
    arrival. Raises `ValueError` for another policy.
    """

    def __init__(self, policy: str) -> None:
        if policy not in ("fcfs", "priority", "fair"):
            raise ValueError(f"policy must be fcfs, priority or fair, got {policy!r}")
        self.policy = policy
        # The earliest start of each tenant's next request.
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def rank(self, request: Request, least_waiting: float) -> float:
        """Return the rank of a new request. `least_waiting`: the least rank in the queue, infinity if it is empty."""
        if self.policy != "fair":
            return request.priority if self.policy == "priority" else 0
        if least_waiting == float("inf"):
            # With an empty queue, tenants that were served have no disadvantage against absent ones.
            self._now = max([self._now, *self._ends.values()])
            self._ends.clear()
        else:
            # Minus infinity is the rank of one that was overtaken too often.
            self._now = max(self._now, least_waiting)
        start = max(self._now, self._ends.get(request.tenant, 0.0))
        if len(self._ends) >= MAX_TENANTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        self._ends[request.tenant] = start + (request.work or self._work(request))
        return start

    @staticmethod
    def _work(request: Request) -> int:
        return len(request.prompt_token_ids) + min(request.params.max_tokens or ANSWER, ANSWER)
