"""Memory for weights, caches and buffers, in huge pages where the system has them.

In a virtual machine every miss of the address cache costs two walks: with pages of 2 MiB two threads read 53 GB/s,
with pages of 4 KiB 37 (docs/performance.md). Called by the parts of this backend, and by `checkpoint.packed`.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

HUGE = 2 * 2**20
POOL_BYTES = 64 * 2**20


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed bytes that start on a page, a huge one if they fill several. A page comes into memory when touched.

    Raises MemoryError.
    """
    large = num_bytes >= 2 * HUGE
    try:
        mapping = mmap.mmap(-1, num_bytes + (HUGE if large else mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from error
    raw = np.frombuffer(mapping, np.uint8)
    skip = -raw.ctypes.data % HUGE if large else 0
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without them refuses; small pages work too, more slowly.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return raw[skip : skip + num_bytes]


class Pool:
    """Pieces of large allocations, for matrices that would not fill huge pages alone. A piece lives as long as its
    array does; the memory goes back when the last one of an allocation is gone."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return `num_bytes` that start on a page. Raises MemoryError."""
        whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if whole > len(self._free):
            self._free = aligned(max(POOL_BYTES, whole))
        piece, self._free = self._free[:num_bytes], self._free[whole:]
        return piece
