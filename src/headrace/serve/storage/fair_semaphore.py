"""`FairSemaphore` bounds the open lines of batches, and shares the permits for them fairly among their holders.

A free permit goes to the holder with the fewest, so a holder's batch delays another's by no more than the line that
ends first. No line starts while other requests wait in the engine's queue, unless none is open. Knows no lines. Called
by `serve.apis.openai.batches`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from headrace.engine import tenants

LOOK_AGAIN_S = 0.02


class FairSemaphore:
    """A semaphore with `limit` permits. `num_others` returns the number of requests that wait in the engine's queue,
    and `is_held_back` whether no permit may be granted now."""

    def __init__(
        self, limit: int, num_others: Callable[[], int], is_held_back: Callable[[], bool] = lambda: False
    ) -> None:
        self._limit, self._num_others, self._is_held_back = limit, num_others, is_held_back
        self._open: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._num_granted = 0
        self._last_granted: dict[str, int] = {}
        self._look_again: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Wait for a permit for the current tenant, and hold it in the block."""
        owner = tenants.current().name
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, future))
        self._grant()
        try:
            await future
            yield
        finally:
            if future.done() and not future.cancelled():
                self._open[owner] -= 1
            self._grant()

    def _grant(self) -> None:
        """Grant the free permits to the waiting holders."""
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        self._waiting = [(owner, future) for owner, future in self._waiting if not future.done()]
        while self._waiting and self._open.total() < self._limit:
            if (self._open.total() and self._num_others()) or self._is_held_back():
                self._look_again = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._grant)
                return
            place = min(range(len(self._waiting)), key=self._claim)
            owner, future = self._waiting.pop(place)
            self._num_granted += 1
            self._last_granted[owner] = self._num_granted
            self._open[owner] += 1
            future.set_result(None)

    def _claim(self, place: int) -> tuple[int, int]:
        """Return the key by which the next permit is granted, the least first: to the holder with the fewest permits,
        and of several to the one whose last grant is longest ago."""
        owner, _ = self._waiting[place]
        return self._open[owner], self._last_granted.get(owner, 0)
