"""Runs a function on pieces of a large array, on a thread for each core that the process may use.

Called by `quant.rtn`, `quant.formats.gguf_blocks` and `quantize.gguf_encode`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def num_cores() -> int:
    """Return the number of cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_all_threads(work: Callable[[int], None], end: int, step: int) -> None:
    """Call `work` with 0, step, 2 * step, ... below `end`. Each thread takes the next number when it is done with one.

    `work` has to spend its time in calls that let other threads run, as numpy's do.
    """
    starts = range(0, end, step)
    num_threads = min(num_cores(), len(starts))
    if num_threads <= 1:
        for first in starts:
            work(first)
        return
    with ThreadPoolExecutor(num_threads, "quantise") as pool:
        list(pool.map(work, starts))
