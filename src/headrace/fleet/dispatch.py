"""`Dispatcher`: the one queue of a fleet. A request leaves it when a replica has room for it. Under the policy fair a
holder's only request leaves it at once: the replica lets it run in its holder's share (`core.shares`).

Requests are in the order of the scheduler's queue, under the same policy: each caller in turn where it is fair, however
many replicas there are. Pure: replicas are numbers. Called by `fleet.engines.client` and the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from headrace.core.queue import Ranks, WaitingQueue
from headrace.fleet.router import Load, Route, Router
from headrace.protocol.step import Request

MAX_LOOKS = 64
"""Requests at the head of the queue that may wait for a better replica while later ones go."""
MAX_OVERTAKING = 32

Item = TypeVar("Item", bound=Hashable)


@dataclass(slots=True, eq=False)
class Waiting(Generic[Item]):
    """An item in the queue, with the keys and the number of the tokens that a replica must compute or have."""

    item: Item
    arrival: int
    rank: float
    keys: Sequence[bytes]
    num_tokens: int
    width: int
    holder: str = ""
    num_overtaken: int = 0

    @property
    def order(self) -> tuple[float, int]:
        return self.rank, self.arrival


def has_room(load: Load, max_num_seqs: int, max_num_batched_tokens: int) -> bool:
    """Return whether a replica can begin another request soon: it has a place, and less than a step of prompts to
    compute."""
    return load.num_open < max_num_seqs and load.num_pending < max_num_batched_tokens


class Dispatcher(Generic[Item]):
    """A queue in front of `router`, in the order of a `policy` of the scheduler's."""

    def __init__(self, router: Router, policy: str) -> None:
        self.router = router
        self._ranks = Ranks(policy)
        self._queue: WaitingQueue[Waiting[Item]] = WaitingQueue(MAX_OVERTAKING)
        self._places: dict[Item, Waiting[Item]] = {}
        self._num_sent: Counter[str] = Counter()
        self._next = count().__next__

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Item]:
        return iter(tuple(self._places))

    def add(self, item: Item, request: Request, keys: Sequence[bytes], is_first: bool = False) -> None:
        """Queue a request; `is_first`: ahead of all that have not run yet."""
        rank = float("-inf") if is_first else self._ranks.rank(request, self._queue.least_rank)
        num_tokens = len(request.prompt_token_ids) + len(request.resume_token_ids)
        width = 1 if request.beam is None else request.beam.beam_width
        self._places[item] = waiting = Waiting(item, self._next(), rank, keys, num_tokens, width, request.tenant)
        self._queue.add(waiting)

    def remove(self, item: Item) -> None:
        """Take an item out of the queue, if it is in there."""
        waiting = self._places.pop(item, None)
        if waiting is not None:
            self._queue.remove(waiting)

    def ended(self, holder: str) -> None:
        """Note that a request of `holder` has left its replica."""
        self._num_sent -= Counter([holder])

    def dispatch(
        self, is_free: Callable[[int], bool], replicas: Callable[[Item], Collection[int]]
    ) -> Iterator[tuple[Item, Route]]:
        """Yield the requests that go to a replica now; the replica `is_free`. `replicas` returns those that can serve
        an item."""
        for waiting in self._alone():
            route = self.router.route(waiting.keys, waiting.num_tokens, replicas(waiting.item), None, waiting.width)
            if route is not None:
                yield self._send(waiting), route
        rooms = {index for index in range(len(self.router.loads)) if is_free(index)}
        awaited: list[Route] = []
        at = 0
        try:
            while rooms and at < min(len(self._queue), MAX_LOOKS):
                waiting = self._queue[at]
                route = self.router.route(
                    waiting.keys, waiting.num_tokens, replicas(waiting.item), rooms, waiting.width
                )
                if route is None or route.index not in rooms:
                    # It waits for a better replica, where it counts before those behind it.
                    awaited += [route] if route is not None else []
                    at += 1
                    continue
                self._send(waiting)
                if self._ranks.policy != "fcfs" and self._queue.count_overtaking(waiting, lambda other: False):
                    at = 0
                    while awaited:
                        self.router.ended(awaited.pop())
                yield waiting.item, route
                rooms = {index for index in rooms if is_free(index)}
        finally:
            for route in awaited:
                self.router.ended(route)

    def _alone(self) -> list[Waiting[Item]]:
        """Return, under the policy fair, the first request of each holder that no replica has a request of."""
        first: dict[str, Waiting[Item]] = {}
        if self._ranks.policy == "fair":
            for index in range(len(self._queue)):
                waiting = self._queue[index]
                if waiting.holder not in self._num_sent:
                    first.setdefault(waiting.holder, waiting)
        return list(first.values())

    def _send(self, waiting: Waiting[Item]) -> Item:
        self.remove(waiting.item)
        self._num_sent[waiting.holder] += 1
        return waiting.item
