"""The scheduler of a recording, run again without the model: `notes_of` yields the journal of the recorded engine.

The executor returns the recorded results, and the clock the recorded times, so that every decision is made again and
compared with the log, on a machine without the model, in microseconds a step. Called by `cli.replay` and `insight`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.core.journal import Journal, Note
from headrace.engine.build import make_scheduler
from headrace.engine.core import EngineCore, Executor
from headrace.engine.records.recording import LogEnd, LogHead, Record, StepEnd, StepError, StepPlan, StepTimes, plan_of
from headrace.engine.records.replay import RecordingError, ReplayDifference, UndoneStepError, compare, read
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.step import Abort, Add, ResetPrefixCache, ScheduledBatch, StepResult


class Recording(NamedTuple):
    """The head of a recording, its config, and the records that follow."""

    head: LogHead
    config: EngineConfig
    records: Iterator[Record]


def open_recording(path: Path) -> Recording:
    """Return the parts of a recording. Raises `RecordingError`."""
    records = read(path)
    head = next(records)
    if not isinstance(head, LogHead):
        raise RecordingError(f"{path} has no head")
    try:
        return Recording(head, msgspec.msgpack.decode(head.config, type=EngineConfig), records)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{path}: its config can not be read by this version: {error}") from error


class RecordedResults(Executor):
    """An executor that returns recorded results. `step` is the recorded one that comes next; its end is missing if the
    executor raised."""

    def __init__(self) -> None:
        self.step: tuple[StepPlan, StepEnd | None] | None = None

    def start(self, batch: ScheduledBatch) -> StepResult:
        if self.step is None:
            raise ReplayDifference(batch.step_id, "its being there", "no such step", "one")
        plan, end = self.step
        compare(plan.step_id, plan, plan_of(batch))
        if end is None:
            raise UndoneStepError(f"step {plan.step_id} raised")
        return end.result

    def finish(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        """Nothing is held."""


class RecordedClock:
    """A clock that returns recorded times; the last one again where there are no more."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._last = 0.0

    def set(self, times: tuple[float, ...]) -> None:
        self._times = list(times)

    def __call__(self) -> float:
        if self._times:
            self._last = self._times.pop(0)
        return self._last


def notes_of(recording: Recording, is_watched: bool = False) -> Iterator[Note]:
    """Yield the note of each recorded step, with the events of blocks if `is_watched`.

    Raises `ReplayDifference` where the scheduler decides otherwise than recorded, and `RecordingError` for a recording
    without times.
    """
    head, config, records = recording
    clock, executor = RecordedClock(), RecordedResults()
    scheduler = make_scheduler(config, head.info, speculates=config.speculative_config is not None)
    core = EngineCore(scheduler, executor, head.info, clock)
    journal = core.journal = Journal(scheduler, clock)
    journal.watch(is_watched)
    plan: StepPlan | None = None
    end: StepEnd | None = None
    for record in records:
        if end is not None and not isinstance(record, StepTimes | LogEnd):
            raise RecordingError("the recording has no times of its steps: an earlier version wrote it")
        match record:
            case Add(request, times):
                # A request that was refused is refused again.
                with contextlib.suppress(RequestError):
                    core.add(request, times)
            case Abort(request_id):
                core.abort(request_id)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case StepPlan():
                plan = record
            case StepEnd():
                end = record
            case StepError() if plan is not None:
                executor.step = plan, None
                with contextlib.suppress(UndoneStepError):
                    core.step()
                plan = None
            case StepTimes(_, step_times) if plan is not None and end is not None:
                if not core.has_work():
                    raise ReplayDifference(plan.step_id, "its being there", "a step", "nothing to do")
                executor.step = plan, end
                clock.set(step_times)
                core.step()
                plan = end = executor.step = None
                if journal.last is not None:
                    yield journal.last
            case LogEnd():
                return
            case _:
                raise RecordingError(f"a {type(record).__name__} where there can be none")
