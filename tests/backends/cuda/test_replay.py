"""Captures of buckets, with stand-ins for CUDA's streams and graphs: the run before one has no rows, whatever step came
last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import _async_compile

from headrace.backends.cuda import replay as module
from headrace.backends.cuda.launch import Config, Kernel, Launch
from headrace.backends.cuda.replay import Replay, compile_kernels

COUNTS = torch.tensor([64, 1, 1], dtype=torch.int32), torch.tensor([[3, 1, 0]], dtype=torch.int32)


class Device:
    """Stands for the GPU: `is_recording` while a graph is captured, when launches do not run."""

    is_recording = False

    def __init__(self) -> None:
        nothing = SimpleNamespace(wait_stream=lambda other: None, pool=lambda: "memory")
        self.cuda = SimpleNamespace(
            Stream=lambda device: nothing, current_stream=lambda device: nothing, stream=self.within,
            synchronize=lambda device: None, CUDAGraph=lambda: nothing, graph=self.recording,
        )  # fmt: skip

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def recording(self, graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        self.is_recording = True
        yield
        self.is_recording = False


class Counted:
    """Work that keeps the counts that it finds when it runs."""

    def __init__(self, device: Device, counts: list[torch.Tensor], fails: bool) -> None:
        self.device, self.counts, self.fails = device, counts, fails
        self.counts_seen: list[list[Any]] = []
        self.recorded = 0

    def run_twin(self) -> None:
        raise AssertionError("twins run on a CPU")

    def run_gpu(self) -> None:
        if self.device.is_recording:
            self.recorded += 1
            return
        self.counts_seen.append([count.tolist() for count in self.counts])
        if self.fails:
            raise RuntimeError("no memory for the code")


def replay_of(monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> tuple[Replay, Counted, list[torch.Tensor]]:
    device, counts = Device(), [count.clone() for count in COUNTS]
    monkeypatch.setattr(module, "torch", device)
    work = Counted(device, counts, fails)
    return Replay(lambda size: [work], [16, 64], torch.device("cuda"), counts), work, counts


def test_the_run_before_a_capture_has_no_rows_and_the_step_has_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, work, counts = replay_of(monkeypatch)
    replay.capture(16)
    assert work.counts_seen == [[[0, 0, 0], [[0, 0, 0]]]]
    assert work.recorded == 1
    assert all(torch.equal(count, before) for count, before in zip(counts, COUNTS, strict=True))


def test_the_rows_are_there_again_after_a_capture_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, _, counts = replay_of(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="no memory"):
        replay.capture(16)
    assert all(torch.equal(count, before) for count, before in zip(counts, COUNTS, strict=True))


class Compiled:
    """Stands for a jitted function: its compilation waits for another one at the same time."""

    def __init__(self, both: threading.Barrier) -> None:
        self.both = both
        self.options: dict[str, Any] = {}

    def warmup(self, **options: Any) -> None:
        self.options = options
        mode = _async_compile.active_mode.get()
        assert mode is not None
        mode.submit(id(self), self.both.wait, lambda kernel: None)


def test_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=30)
    jits = [Compiled(both), Compiled(both)]
    launches = [Launch(Kernel(jit, lambda a: None), (7,), {"x": 1}, Config({"BM": 16}, 8, 2)) for jit in jits]
    compile_kernels(launches)
    assert jits[1].options == {
        "grid": (7,), "x": 1, "BM": 16, "num_warps": 8, "num_stages": 2, "enable_fp_fusion": True,
    }  # fmt: skip


def test_an_error_of_a_compilation_is_raised() -> None:
    launch = Launch(Kernel(Compiled(threading.Barrier(2, timeout=0.01)), lambda a: None), (1,), {}, Config())
    with pytest.raises(threading.BrokenBarrierError):
        compile_kernels([launch])
