"""`Turns` shares the open lines of batches among their holders.

A free turn goes to the holder who has the fewest, so a holder's batch delays another's by no more than the line that
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


class Turns:
    """`limit` turns. `num_others` returns the number of requests that wait in the engine's queue."""

    def __init__(self, limit: int, num_others: Callable[[], int]) -> None:
        self._limit, self._num_others = limit, num_others
        self._open: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._num_given = 0
        self._last_given: dict[str, int] = {}
        self._look_again: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn of the current tenant, and keep it in the block."""
        owner = tenants.current().name
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, future))
        self._give()
        try:
            await future
            yield
        finally:
            if future.done() and not future.cancelled():
                self._open[owner] -= 1
            self._give()

    def _give(self) -> None:
        """Give the free turns to those who wait."""
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        self._waiting = [(owner, future) for owner, future in self._waiting if not future.done()]
        while self._waiting and self._open.total() < self._limit:
            if self._open.total() and self._num_others():
                self._look_again = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._give)
                return
            place = min(range(len(self._waiting)), key=self._claim)
            owner, future = self._waiting.pop(place)
            self._num_given += 1
            self._last_given[owner] = self._num_given
            self._open[owner] += 1
            future.set_result(None)

    def _claim(self, place: int) -> tuple[int, int]:
        """The least is the next: who has the fewest turns, and of these who waits longest for one."""
        owner, _ = self._waiting[place]
        return self._open[owner], self._last_given.get(owner, 0)
