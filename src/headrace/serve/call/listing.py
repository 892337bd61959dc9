"""`Listing`: the facts about models for lists of them, read on a thread of its own while calls wait without one.

All calls that need the facts of a model wait for the same reading. A list waits for a while only, and has the facts of
the last list for a model whose files are not read by then. Knows no files; `engine.library.facts_reader` reads them in
its process. Held by `serve.call.models.ModelSet`; used from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.engine.library import facts_reader
from headrace.engine.library.model_facts import ModelFacts
from headrace.protocol.errors import ChildFailedError, HeadraceError

logger = logging.getLogger("headrace.server")

LIST_S = 3.0
"""Seconds for which a list waits for files."""
NO_FACTS = ModelFacts(format="", family="", size=0, digest="", modified=0.0)


class Listing:
    """The readings that run, by the name of the model."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-facts")
        self._readings: dict[str, asyncio.Future[ModelFacts | None]] = {}
        # The facts that lists had last; None for files that can not be read.
        self._latest: dict[str, ModelFacts | None] = {}

    async def facts(self, name: str, read: Callable[[], ModelFacts | None]) -> ModelFacts:
        """Return `read()`, called on the thread, or the result of the call for this name that runs. Raises its
        errors; None are `NO_FACTS`."""
        reading = self._readings.get(name)
        if reading is None:
            reading = asyncio.get_running_loop().run_in_executor(self._thread, read)
            self._readings[name] = reading
            reading.add_done_callback(lambda done: self._end(name, done))
        return await asyncio.shield(reading) or NO_FACTS

    async def of(self, names: Sequence[str], facts: Callable[[str], Awaitable[ModelFacts]]) -> dict[str, ModelFacts]:
        """Return the facts of these models. One that is not read in time has those of the last list, or `NO_FACTS`.
        Models whose files can not be read are left out, and logged once."""
        tasks = {name: asyncio.ensure_future(facts(name)) for name in names}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=LIST_S)
        for name, task in tasks.items():
            if not task.done():
                # The reading itself goes on, for the next list.
                task.cancel()
                continue
            try:
                self._latest[name] = task.result()
            except ChildFailedError:
                continue
            except HeadraceError as error:
                if self._latest.get(name, NO_FACTS) is not None:
                    logger.warning("%s is not listed: %s", name, error)
                self._latest[name] = None
        latest = {name: self._latest.get(name, NO_FACTS) for name in names}
        return {name: facts for name, facts in latest.items() if facts is not None}

    def close(self) -> None:
        """End the reading that runs, and refuse those that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._readings:
            facts_reader.shared().process.close()

    def _end(self, name: str, reading: asyncio.Future[ModelFacts | None]) -> None:
        del self._readings[name]
        if not reading.cancelled():
            # It is logged where a call waits for it; none may.
            reading.exception()
