"""`State`: the states of a server, in the words of its probes; `Sleep`: the states that orders change, in one place.

The engines load once, and then sleep and wake by orders, one change at a time. Whether an engine restarts or the server
drains is seen elsewhere (`serve.lifespan`), which refuses orders meanwhile. Knows no HTTP and starts no engine itself;
`models` holds a `Sleep`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum

from headrace.engine.generation import in_time
from headrace.protocol.errors import HeadraceError

logger = logging.getLogger("headrace.server")

ORDER_S = 120.0
"""Seconds that an order waits for the change that it began, or joined. The change goes on after them."""


class State(StrEnum):
    """What a server does now."""

    LOADING = "loading"
    READY = "ready"
    FALLING_ASLEEP = "falling asleep"
    SLEEPING = "sleeping"
    WAKING = "waking"
    RESTARTING = "restarting"
    STALLED = "stalled"
    IMPAIRED = "impaired"
    DRAINING = "draining"
    DEAD = "dead"


NEXT = {
    State.LOADING: {State.READY},
    State.READY: {State.FALLING_ASLEEP},
    State.FALLING_ASLEEP: {State.SLEEPING},
    State.SLEEPING: {State.WAKING},
    # The engine may not load again.
    State.WAKING: {State.READY, State.SLEEPING},
}
"""The states of a `Sleep`, and those that follow each."""
SERVING = frozenset({State.READY, State.STALLED, State.IMPAIRED})
"""The states in which an engine can take orders."""
ASLEEP = frozenset({State.FALLING_ASLEEP, State.SLEEPING})


class NotReadyError(HeadraceError):
    """An order that can not be carried out in the state of the server (HTTP 503)."""

    status = 503
    code = "not_ready"

    def __init__(self, message: str, retry_after: int | None = 1) -> None:
        self.retry_after = retry_after
        super().__init__(message)


def refusal(state: State) -> NotReadyError:
    """Return the error of an order that has to wait until the server is in another state."""
    is_ending = state in (State.DRAINING, State.DEAD)
    words = "is over" if state is State.DEAD else f"is {state}"
    return NotReadyError(
        f"the server {words}; this can be done when /health/ready says ready", None if is_ending else 1
    )


class Sleep:
    """The sleep of a server's models. `end` ends their engines when no answer needs them, `start` starts again the one
    that stays; both may take long."""

    def __init__(self, state: State, end: Callable[[], Awaitable[None]], start: Callable[[], Awaitable[None]]) -> None:
        self.state = state
        self._end, self._start = end, start
        self._change: asyncio.Task[None] | None = None
        self._error = ""

    def become(self, state: State) -> None:
        """Go into the next state. Raises `ValueError` for one that does not follow the present one."""
        if state not in NEXT[self.state]:
            raise ValueError(f"the state {state} after {self.state}")
        self.state = state

    @property
    def is_over(self) -> bool:
        """Whether the engines run, or load for the first time."""
        return self.state in (State.LOADING, State.READY)

    async def fall_asleep(self) -> None:
        """End the engines. Raises `NotReadyError` while they load, and if they have not ended in time: they end later
        then."""
        if self.state is State.READY:
            self.become(State.FALLING_ASLEEP)
            self._begin(self._fall())
        if self.state not in ASLEEP:
            raise refusal(self.state)
        if self.state is State.FALLING_ASLEEP:
            await self._until_changed("the running answers ended")

    async def wake_up(self) -> None:
        """Start the engines, after their end if they are ending. Raises `NotReadyError` while they load for the first
        time, if they do not load, and if they have not loaded in time: they do so later then."""
        if self.state is State.LOADING:
            raise refusal(self.state)
        if self.state is State.FALLING_ASLEEP:
            await self._until_changed("the running answers ended")
        if self.state is State.SLEEPING:
            self.become(State.WAKING)
            self._begin(self._wake())
        if self.state is State.WAKING:
            await self._until_changed("the model was loaded again")
            if self._error:
                raise NotReadyError(f"the model could not be loaded again: {self._error}", None)

    async def close(self) -> None:
        """End the change that is under way."""
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)

    def _begin(self, work: Awaitable[None]) -> None:
        # It belongs to no call: it has neither the caller's name nor its deadline.
        self._change = asyncio.get_running_loop().create_task(_awaited(work), context=contextvars.Context())

    async def _until_changed(self, what: str) -> None:
        """Wait for the change, for as long as an order may. `what` names it, for the error of a call's own deadline."""
        if self._change is None:
            return
        # It goes on if the caller leaves.
        waiting = in_time(asyncio.wait({self._change}, timeout=ORDER_S), what)
        if not (await waiting)[0]:
            raise NotReadyError(f"the server is still {self.state} after {ORDER_S:g} s; it goes on with that", 10)

    async def _fall(self) -> None:
        try:
            await self._end()
        except Exception as error:  # of any kind: a server that neither sleeps nor wakes would be of no use
            logger.error("an engine did not end as it should", exc_info=error)
        self.become(State.SLEEPING)
        logger.info("the server sleeps")

    async def _wake(self) -> None:
        self._error = ""
        try:
            await self._start()
        except Exception as error:  # of any kind, as above
            expected = isinstance(error, HeadraceError | OSError)
            self._error = str(error) if expected else "the server's log has more"
            logger.error("the engine did not start again: %s", error, exc_info=None if expected else error)
        self.become(State.SLEEPING if self._error else State.READY)


async def _awaited(work: Awaitable[None]) -> None:
    await work
