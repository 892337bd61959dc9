"""Memory that the server freed goes back to the system.

The C library keeps what lies between things that are still used, and under a mix of requests their places wander: what
is in use stays the same, and what the process holds grows by some MiB an hour.
"""

from __future__ import annotations

import asyncio
import ctypes

EVERY_S = 60.0


def give_back() -> bool:
    """Whole free pages of the heap; False if the C library has no such call (it is glibc's)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


async def keep_giving_back() -> None:
    """Once a minute, in a thread: the event loop does not wait for it."""
    while await asyncio.to_thread(give_back):
        await asyncio.sleep(EVERY_S)
