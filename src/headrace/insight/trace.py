"""The journal as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) opens: a track of steps, and one for
each request. Called by `headrace explain --trace`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.core.journal import Step
from headrace.insight.lives import Life

STEPS, REQUESTS = 1, 2


def trace_of(steps: Iterable[Step], lives: Iterable[Life]) -> dict[str, Any]:
    """Return the trace. Times are microseconds of the engine's clock."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((STEPS, "engine"), (REQUESTS, "requests"))
    ]
    for step in steps:
        start_time, scheduled, computed, ended = step.times
        args = {
            "step": step.step_id,
            "sequences": len(step.seq_ids),
            "tokens": sum(step.lens),
            "guesses": sum(num for _, num, _ in step.guesses),
            "preemptions": len(step.preemptions),
        }
        events.append(slice_of(f"step {step.step_id}", start_time, ended, STEPS, 0) | {"args": args})
        for name, start, stop in (
            ("schedule", start_time, scheduled),
            ("compute", scheduled, computed),
            ("commit", computed, ended),
        ):
            events.append(slice_of(name, start, stop, STEPS, 0))
    for life in lives:
        track = life.arrival.seq_id
        label = {"name": life.request_id}
        events.append({"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": track, "args": label})
        events += [slice_of(part, begin, end, REQUESTS, track) for part, begin, end in life.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def slice_of(name: str, begin: float, end: float, pid: int, tid: int) -> dict[str, Any]:
    """Return a complete event."""
    return {
        "ph": "X",
        "name": name,
        "ts": round(1e6 * begin, 3),
        "dur": round(1e6 * (end - begin), 3),
        "pid": pid,
        "tid": tid,
    }
