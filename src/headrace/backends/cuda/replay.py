"""Runs the launches of a bucket: as twins on a CPU, by one CUDA graph on a GPU.

The first buckets are captured when the program is made, after several threads have compiled their kernels. Another one
is captured when it is first met, while a larger one serves its step. Knows launches; must not know chunks. Called by
`program`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from triton import AsyncCompileMode

from headrace.backends.cuda.launch import Launch, Work

Bind = Callable[[int], list[Work]]

MOST_THREADS = 16
"""That compile kernels at once."""


def compile_kernels(work: Iterable[Work]) -> None:
    """Compile the kernels that the work needs and that Triton's cache on disk does not have, several at a time."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
        for each in work:
            if isinstance(each, Launch):
                each.compile()


class Replay:
    """The launches of each bucket of rows.

    Args:
        bind: returns the launches for a bucket.
        sizes: the buckets, ascending; each holds steps of at most so many rows.
        counts: numbers of rows and of items in device memory, from which launches take how much a step has to do.
    """

    def __init__(self, bind: Bind, sizes: Sequence[int], device: torch.device, counts: Sequence[Tensor]) -> None:
        self.sizes = list(sizes)
        self._bind, self._device, self._counts = bind, device, counts
        self._launches: dict[int, list[Work]] = {}
        self._graphs: dict[int, Any] = {}
        self._pool: Any = None

    def prepare(self) -> None:
        """Capture some buckets, from one row to the most, before the first step; elsewhere than on a GPU do nothing."""
        if self._device.type == "cuda":
            last = len(self.sizes) - 1
            chosen = sorted({0, last // 3, 2 * last // 3, last}, reverse=True)
            compile_kernels(work for place in chosen for work in self.launches(self.sizes[place]))
            for place in track(chosen, "capturing CUDA graphs", transient=True, disable=not sys.stderr.isatty()):
                self.capture(self.sizes[place])

    def run(self, num_rows: int) -> None:
        """Run the step of `num_rows` rows whose inputs lie on the device."""
        size = self.bucket(num_rows)
        if self._device.type != "cuda":
            for launch in self.launches(size):
                launch.run_twin()
            return
        if size not in self._graphs:
            larger = [other for other in self._graphs if other > size]
            if larger:
                self._graphs[min(larger)].replay()
            self.capture(size)
            if larger:
                return
        self._graphs[size].replay()

    def bucket(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= num_rows)

    def launches(self, size: int) -> list[Work]:
        if size not in self._launches:
            self._launches[size] = self._bind(size)
        return self._launches[size]

    def capture(self, size: int) -> None:
        """Record the bucket's launches in a CUDA graph, whatever step came last. Memory is shared among the graphs."""
        launches = self.launches(size)
        compile_kernels(launches)
        # A run outside the capture loads the kernels.
        stream = torch.cuda.Stream(self._device)
        # The larger bucket's replay may still run: both write the same buffers.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), self._without_rows():
            for launch in launches:
                launch.run_gpu()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            for launch in launches:
                launch.run_gpu()
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph

    @contextmanager
    def _without_rows(self) -> Iterator[None]:
        """Let launches find nothing to do: the last step may have had more rows than the bucket has scratch for."""
        of_step = [count.clone() for count in self._counts]
        for count in self._counts:
            count.zero_()
        try:
            yield
        finally:
            for count, number in zip(self._counts, of_step, strict=True):
                count.copy_(number)

    def close(self) -> None:
        self._graphs.clear()
        self._launches.clear()
