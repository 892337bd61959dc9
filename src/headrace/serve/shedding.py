"""`Shedding`: measures the pressures of the server's process for `gates.overload`, and shows them in metrics and on the
page.

Memory is what the process has to itself, without files that are mapped. Open files are counted against the reserve that
connections leave (`gates.connection`). The delay of the event loop is the median of its last samples, so that one long
call is no overload. Made by `serve.app`; `lifespan` calls `sample` with each delay that it measures.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.serve.gates.connection import max_connections
from headrace.serve.gates.overload import Overload, State, Work

logger = logging.getLogger("headrace.server")

NUM_LAGS = 5
DEFAULT_MEMORY_BYTES = 4 * 2**30
DEFAULT_LAG_SECONDS = 2.0
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Shedding:
    """`bounds`: `memory_bytes` and `lag_seconds`, where they are not the defaults.

    Attributes:
        overload: the state, which `sample` moves.
    """

    def __init__(self, bounds: Mapping[str, Any] | None = None) -> None:
        bounds = bounds or {}
        self.overload = Overload()
        self._memory_bytes = bounds.get("memory_bytes") or min(DEFAULT_MEMORY_BYTES, usable_memory() // 2)
        self._lag_seconds = bounds.get("lag_seconds") or DEFAULT_LAG_SECONDS
        self._lags: deque[float] = deque([0.0] * NUM_LAGS, NUM_LAGS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def sample(self, lag: float) -> None:
        """Measure, after the event loop ran a timer `lag` seconds late."""
        self._lags.append(lag)
        before = self.overload.state
        try:
            pressures = self.pressures()
        except OSError:  # no descriptor is left to measure with
            pressures = dict(self.overload.pressures) | {"open_files": 1.0}
        self.overload.step(pressures, time.monotonic())
        state = self.overload.state
        if state != before:
            level = logging.WARNING if state > before else logging.INFO
            logger.log(level, "overload: %s, was %s: %s", state.word, before.word, self.overload.why)

    def pressures(self) -> dict[str, float]:
        """Return the part of its bound that is in use of each resource."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserve = soft - max_connections()
        return {
            "memory": private_bytes() / self._memory_bytes,
            "open_files": 0.0 if reserve <= 0 else max(0.0, 1 - (soft - num_open_files()) / (2 * reserve)),
            "lag": statistics.median(self._lags) / self._lag_seconds,
        }

    def shown(self) -> dict[str, Any]:
        """Return the state for the page."""
        overload = self.overload
        words = {"state": overload.state.word, "why": overload.why, "refused": overload.refused}
        return {**words, "pressures": dict(overload.pressures)}

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        words = ", ".join(f"{state.value} {state.word}" for state in State)
        yield GaugeMetricFamily("headrace:overload_state", f"Calls that are refused: {words}.", self.overload.state)
        pressures = GaugeMetricFamily(
            "headrace:overload_pressure", "Part of its bound that is in use of a resource.", labels=("resource",)
        )
        for name, pressure in self.overload.pressures.items():
            pressures.add_metric((name,), pressure)
        yield pressures
        refused = CounterMetricFamily(
            "headrace:overload_refused", "Calls that were refused under overload.", labels=("class",)
        )
        for work in Work:
            refused.add_metric((work.name.lower(),), self.overload.num_refused[work])
        yield refused


def usable_memory() -> int:
    """Return the bytes of memory that this machine, or this process's group on it, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        return min(total, int(CGROUP_LIMIT.read_text()))
    return total


def private_bytes() -> int:
    """Return the resident bytes of this process, without those of mapped files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def num_open_files() -> int:
    """Return how many files are open in this process."""
    # Linux counts them since 6.2.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
