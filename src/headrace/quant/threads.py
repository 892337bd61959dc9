"""Runs a function on pieces of a large array, on as many threads as torch is set to.

Called by `quant.rtn`, `quant.formats.gguf_blocks` and `quantize.gguf_encode`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def on_all_threads(work: Callable[[int], None], end: int, step: int) -> None:
    """Call `work` with 0, step, 2 * step, ... below `end`. Each thread takes the next number when it is done with one.

    torch's own threads meet at a barrier after every operation, where all wait for the slowest; these need not wait.
    """
    starts = range(0, end, step)
    num_threads = torch.get_num_threads()
    if min(num_threads, len(starts)) <= 1:
        for first in starts:
            work(first)
        return
    try:
        with ThreadPoolExecutor(min(num_threads, len(starts)), "quantise", torch.set_num_threads, (1,)) as pool:
            list(pool.map(work, starts))
    finally:
        torch.set_num_threads(num_threads)
