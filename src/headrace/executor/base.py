"""`Executor`: what turns a `ScheduledBatch` into a `StepResult`. The engine core holds one and knows no more of it."""

from __future__ import annotations

from typing import Protocol

from headrace.types import ScheduledBatch, StepResult


class Executor(Protocol):
    """Owns the model and the KV cache's memory; `inproc` runs them here, `simulated` pretends (and proves)."""

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Compute one step. Raises only for faults that no single request owns."""
        ...

    def close(self) -> None:
        """Give back memory and threads. May be called twice."""
        ...
