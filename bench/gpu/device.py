"""`Device`: where kernels run in this folder, and how long that takes. On a CPU they run as their twins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.backends.cuda.launch import Launch
from headrace.backends.cuda.program import num_programs

REPEATS = 7
LEAST = 0.004
"""Seconds that one measurement takes at least."""
CACHED = 256 * 2**20
"""Bytes that operands measured in turn must have together, so that none is still in the cache: several times L2."""

Call = Callable[[], Any]


class Device:
    """toy: small problems; always on a CPU."""

    def __init__(self, toy: bool) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.toy = toy or not self.is_gpu
        self.name = "cuda" if self.is_gpu else "cpu"
        self.num_programs = num_programs(torch.device(self.name))
        self.capability = 10 * torch.cuda.get_device_capability()[0] if self.is_gpu else 90

    def describe(self) -> dict[str, Any]:
        import triton

        name = torch.cuda.get_device_name() if self.is_gpu else "no GPU: twins on a CPU, figures mean nothing"
        versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        return {"name": name, "date": time.strftime("%Y-%m-%d"), "toy": self.toy, "versions": versions}

    def free_memory(self) -> int:
        """Return the bytes that this process may use: free on the GPU or held by torch; 2^50 without a GPU."""
        if not self.is_gpu:
            return 2**50
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            if self.is_gpu:
                launch.run_gpu()
            else:
                launch.run_twin()
        if self.is_gpu:
            torch.cuda.synchronize()

    def call(self, launches: Sequence[Launch]) -> Call:
        """Return a function that runs the launches without waiting for them."""

        def run() -> None:
            for launch in launches:
                if self.is_gpu:
                    launch.run_gpu()
                else:
                    launch.run_twin()

        return run

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the median seconds of one of `calls`, which do the same on operands of their own.

        On a GPU they are captured one behind the other in a CUDA graph, which is replayed between two events.
        """
        if not self.is_gpu:
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) / len(calls)
        torch.cuda.synchronize()  # what the operands are made by runs on another stream
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for call in calls[:1]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        first = elapsed(graph.replay, 1)
        turns = max(int(LEAST / max(first, 1e-6)), 1)
        times = sorted(elapsed(graph.replay, turns) for _ in range(REPEATS))
        return times[REPEATS // 2] / len(calls)

    def copies(self, num_bytes: int) -> int:
        """Return how many sets of operands of so many bytes are measured in turn."""
        return 1 if self.toy else max(min(CACHED // max(num_bytes, 1), 16), 1)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Return normal numbers, made on the device."""
        return (torch.randn(*shape, device=self.name) * scale).to(dtype)


def elapsed(call: Call, turns: int) -> float:
    """Return the seconds of one of `turns` calls on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(turns):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / turns


def ceilings(device: Device) -> dict[str, Any]:
    """Return bytes per second read and copied, and flops per second of torch's products, of random numbers."""
    size = 2**16 if device.toy else 2**31
    source = device.random(size // 2)
    target = torch.empty_like(source)
    copy = device.seconds([lambda: target.copy_(source)])
    read = device.seconds([lambda: source.view(torch.int32).view(256, -1).amax(1)])
    width = 128 if device.toy else 8192
    a, b = device.random(width, width), device.random(width, width)
    product = device.seconds([lambda: torch.mm(a, b.t())])
    result: dict[str, Any] = {
        "read": size / read,
        "copy": 2 * size / copy,
        "bandwidth": max(size / read, 2 * size / copy),
        "bf16": 2 * width**3 / product,
    }
    if device.capability >= 90:
        c, d, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device.name)
        eight = device.seconds([
            lambda: torch._scaled_mm(c, d.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        ])  # fmt: skip
        result["fp8"] = 2 * width**3 / eight
    return result
