"""The error of a call while the server sleeps, and the sleep of idle engines, from which the next call wakes them.
Knows no HTTP and starts no engine itself; `models` calls it, and `serve.app` makes an `IdleSleep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.engine import context
from headrace.engine.generation import in_time
from headrace.protocol.errors import QueueFullError
from headrace.serve.call.states import NotReadyError, Sleep, State

WATCH_S = 0.1
"""Seconds between two checks of whether the engines are idle."""


class SleepingError(QueueFullError):
    """The server sleeps, and its models are not in memory (HTTP 503). The lines of batches wait until it wakes."""

    status = 503
    code = "sleeping"


async def refuse(sleep: Sleep) -> None:
    """Raise `SleepingError`."""
    if sleep.state is State.WAKING:
        raise SleepingError("the server wakes; its model is loaded again", retry_after=1)
    raise SleepingError("the server sleeps; POST /wake_up wakes it", retry_after=10)


class Sleeper(Protocol):
    """The models of a server, which can sleep."""

    sleep: Sleep
    rouse: Callable[[], Awaitable[None]]

    def last_use(self) -> float: ...


class IdleSleep:
    """Puts `models` to sleep after `seconds` without a call, and wakes them for the next one. A sleep by /sleep still
    lasts until /wake_up. `is_alive`: whether there is an engine that can sleep."""

    def __init__(self, models: Sleeper, seconds: float, is_alive: Callable[[], bool]) -> None:
        self._models, self._seconds, self._is_alive = models, seconds, is_alive
        self._dozes = False
        models.rouse = self.rouse

    @property
    def is_dozing(self) -> bool:
        """Whether the models sleep until a call comes."""
        return self._dozes and not self._models.sleep.is_over

    async def watch(self) -> None:
        """Put the models to sleep whenever they are idle."""
        awake_since = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            if self._models.sleep.state is not State.READY or not self._is_alive():
                awake_since = time.monotonic()
                continue
            self._dozes = time.monotonic() - max(awake_since, self._models.last_use()) >= self._seconds
            if self._dozes:
                with contextlib.suppress(NotReadyError):
                    await self._models.sleep.fall_asleep()

    def deepen(self) -> None:
        """Note a sleep by /sleep, which no call ends."""
        self._dozes = False

    async def rouse(self) -> None:
        """Wake the models before the deadline of the call. Raises `SleepingError` for a sleep by /sleep."""
        if not self.is_dozing:
            await refuse(self._models.sleep)
        with context.within(None, context.arrival()):
            await in_time(self._models.sleep.wake_up(), "its model was loaded again")
