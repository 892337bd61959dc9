"""`Writers` runs the calls that read and change the storage's files on threads: for each holder one call after the
other.

So the event loop never waits for a disk, no holder's calls wait for another holder's, and no call reads an entry while
another call changes it. Knows no stores. Made by `serve.apis.openai.storage`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.engine import tenants

logger = logging.getLogger("headrace.server")

MAX_THREADS = 64

T = TypeVar("T")


class Writers:
    """A queue for each holder, and threads for all of them."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="headrace-storage")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, called as the current tenant after the tenant's earlier calls. It is called to its
        end even if the caller is cancelled meanwhile."""
        loop = asyncio.get_running_loop()
        call = functools.partial(contextvars.copy_context().run, function, *args)
        async with self._locks.setdefault(tenants.current().name, asyncio.Lock()):
            future = loop.run_in_executor(self._threads, call)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                while not future.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({future})
                if (error := future.exception()) is not None:
                    logger.warning("a call to the storage failed whose caller had gone: %s", error)
                raise

    def close(self) -> None:
        """Wait for the calls that run."""
        self._threads.shutdown()
