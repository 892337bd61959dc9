"""What keeps the process from growing though nothing leaks.

asyncio takes 256 KiB for each read and shrinks that to what came. The next read finds no such gap any more where
something small was put meanwhile, and the heap gets longer: by 7 MiB an hour with 20 requests a second.
"""

from __future__ import annotations

import asyncio

READ_BYTES = 16 << 10


def read_small(transport: asyncio.BaseTransport) -> None:
    """Let a transport take no more than `READ_BYTES` for a read. Others than asyncio's own have no such number."""
    if hasattr(transport, "max_size"):
        transport.max_size = READ_BYTES
