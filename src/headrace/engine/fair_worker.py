"""`FairWorker` shares a bounded process among the callers of a server: one job at a time, the callers in turn.

A caller with many jobs delays another by one job (as long as `text.bounded` lets one run). A job whose caller has gone
leaves the queue; one that runs is left to the process's own bounds. An idle process gets a ping now and then, so that
one that stands still is replaced before a call needs it, and the probes show it. Knows no jobs. Held by
`generation.TextClient` for grammars and texts, and by `serve.call.service` for templates; used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.engine import tenants
from headrace.protocol.errors import ChildFailedError, EngineDeadError
from headrace.text.bounded import BoundedProcess

PING_S = 1.0
MAX_PING_S = 30.0
"""Between attempts to start a process that does not start."""

T = TypeVar("T")


class FairWorker:
    """A thread that runs work with `process`."""

    def __init__(self, process: BoundedProcess) -> None:
        self.process = process
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-worker")
        # By caller, in the order of their turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_busy = False
        self._is_closed = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def status(self) -> str:
        """Return "ready", "stalled" (the process stands still, and half of its watchdog's time is over), or "impaired"
        (it failed, and no other has answered yet)."""
        if self.process.fault:
            return "impaired"
        return "stalled" if self.process.watchdog.is_stalled else "ready"

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, called on the thread when the caller's turn comes. Raises its errors, and `EngineDeadError`
        when the worker is closed."""
        if self._is_closed:
            raise EngineDeadError("the server is shutting down")
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_watch())
        if self._is_busy:
            await self._turn()
        self._is_busy = True
        job = asyncio.get_running_loop().run_in_executor(self._thread, work)
        job.add_done_callback(self._end)
        return await asyncio.shield(job)

    def close(self) -> None:
        """End the work that runs and refuse the work that waits. An idle process stays until the program ends."""
        self._is_closed = True
        for waiting in self._waiting.values():
            for turn in waiting:
                if not turn.done():
                    turn.set_exception(EngineDeadError("the server is shutting down"))
        self._waiting.clear()
        if self._watch is not None:
            self._watch.cancel()
        if self._is_busy:
            self.process.close()
        self._thread.shutdown(wait=False)

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenants.current().name, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The turn had come just before.
                self._next()
            raise

    def _end(self, job: asyncio.Future[Any]) -> None:
        if not job.cancelled():
            # The error of a job whose caller has gone is not logged: it may name the caller's text.
            job.exception()
        self._next()

    def _next(self) -> None:
        self._is_busy = False
        while self._waiting:
            name, waiting = next(iter(self._waiting.items()))
            turn = waiting.popleft()
            if waiting:
                self._waiting.move_to_end(name)
            else:
                del self._waiting[name]
            if not turn.done():
                self._is_busy = True
                turn.set_result(None)
                return

    async def _keep_watch(self) -> None:
        delay = PING_S
        while True:
            await asyncio.sleep(delay)
            delay = PING_S
            if self._is_busy:
                continue
            try:
                await self.run(self.process.ping)
            except ChildFailedError:
                # The process has logged it; the status shows it.
                delay = min(2 * delay, MAX_PING_S)
