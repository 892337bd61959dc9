"""Runs a recorded engine again (`recording`), and reports the first step that differs.

An engine of the same config gets the recorded requests before the same steps; the clock and the lateness of masks are
the recorded ones. The engine decides and computes everything else again, and each step is compared with the log: the
same chunks of the same sequences in the same blocks, the same tokens, the same bits of log-probabilities. `cli.replay`
builds the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headrace.engine.core import EngineCore, Executor, Ticket
from headrace.engine.records.recording import (
    MAGIC,
    MAX_FRAME_BYTES,
    Clocked,
    LogEnd,
    LogHead,
    Record,
    StepEnd,
    StepError,
    StepPlan,
    StepTimes,
    Waited,
    plan_of,
)
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.step import Abort, Add, ResetPrefixCache, RowResult, ScheduledBatch, StepResult

SHOWN_CHARS = 200
INTERRUPTS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
"""Exceptions that come from outside, at no step in particular."""


class RecordingError(HeadraceError):
    """The file is not a recording, or a part of it is damaged."""

    code = "bad_recording"


class ReplayDifference(HeadraceError):
    """The replay differs from the log. `step_id` is the first step that differs."""

    code = "replay_differs"

    def __init__(self, step_id: int, what: str, recorded: object, replayed: object) -> None:
        self.step_id = step_id
        self.what = what
        values = f"the log has {shown(recorded)}, the replay {shown(replayed)}"
        super().__init__(f"step {step_id} differs in {what}: {values}")


class UndoneStepError(HeadraceError):
    """A step of the replay raised the same error as the recorded one."""


def shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " ..."


class Outcome(msgspec.Struct):
    """Counts of the steps that were replayed without a difference. `unfinished`: the log ends in the middle of a step,
    which was run here too; `end` is the log's reason for its end, if it has one."""

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0
    num_raised: int = 0
    unfinished: bool = False
    end: str = ""


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a log, the `LogHead` first. A last record that its writer's death cut off is left out.

    Raises `RecordingError`.
    """
    decoder = msgspec.msgpack.Decoder(Record)
    first = True
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{path} is no recording of a schedule")
        while len(size := file.read(4)) == 4:
            length = int.from_bytes(size, "little")
            if length > MAX_FRAME_BYTES:
                raise RecordingError(
                    f"{path}: a frame of {length} bytes at {file.tell() - 4}; at most {MAX_FRAME_BYTES}"
                )
            payload = file.read(length)
            if len(payload) < length:
                return
            try:
                record = decoder.decode(payload)
            except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
                raise RecordingError(f"{path}: the frame that ends at {file.tell()} is damaged: {error}") from error
            if first != isinstance(record, LogHead):
                raise RecordingError(f"{path}: a log begins with its head, and has one")
            first = False
            yield record
    if first:
        raise RecordingError(f"{path} has no head")


class Script:
    """Replays the clock and the lateness of masks of a step."""

    def __init__(self, speculator: Clocked | None, matchers: Waited | None) -> None:
        self.times: list[float] | None = None
        self.late: list[list[int]] | None = None
        self._num_times = 0
        self._num_late = 0
        if speculator is not None:
            speculator.clock = self._clock
        if matchers is not None:
            self._wait = matchers.wait
            matchers.wait = self._late  # type: ignore[method-assign]

    def begin(self, end: StepEnd | None) -> None:
        """Begin a step. None: the log has no result of it, so clock and masks are real."""
        self.times, self.late = (None, None) if end is None else (end.times, end.late)
        self._num_times = self._num_late = 0

    def end(self, step_id: int) -> None:
        """Raise `ReplayDifference` if the step read clock or masks more or less often than recorded."""
        for what, script, num in (("clock", self.times, self._num_times), ("masks", self.late, self._num_late)):
            if script is not None and len(script) != num:
                raise ReplayDifference(step_id, f"how often it asked for the {what}", len(script), num)

    # These do not raise: the runner would take an error for a fault of a request.

    def _clock(self) -> float:
        self._num_times += 1
        if self.times is None:
            return time.monotonic()
        return self.times[min(self._num_times, len(self.times)) - 1] if self.times else 0.0

    def _late(self, seq_ids: list[int], others: bool) -> set[int]:
        self._num_late += 1
        if self.late is None or self._num_late > len(self.late):
            return self._wait(seq_ids, others)
        return set(self.late[self._num_late - 1])


class CheckingExecutor(Executor):
    """An executor that compares each step with the log."""

    def __init__(self, inner: Executor, script: Script) -> None:
        self.expected: tuple[StepPlan, StepEnd | StepError | None] | None = None
        self._inner = inner
        self._script = script

    def start(self, batch: ScheduledBatch) -> Ticket:
        if self.expected is None:
            raise ReplayDifference(batch.step_id, "its being there", "no such step", "one")
        plan, end = self.expected
        compare(plan.step_id, plan, plan_of(batch))
        if isinstance(end, StepError):
            self._raise_again(batch, end.kind)
        self._script.begin(end)
        return plan.step_id, end, self._inner.start(batch)

    def finish(self, ticket: Ticket) -> StepResult:
        step_id, end, inner = ticket
        result = self._inner.finish(inner)
        if end is not None:
            compare(step_id, end.result, result)
            self._script.end(step_id)
        return result

    def _raise_again(self, batch: ScheduledBatch, kind: str) -> NoReturn:
        if kind not in INTERRUPTS:
            self._script.begin(None)
            try:
                self._inner.run(batch)
            except Exception as error:
                if type(error).__name__ != kind:
                    raise ReplayDifference(batch.step_id, "what it raised", kind, type(error).__name__) from error
            else:
                raise ReplayDifference(batch.step_id, "its end", kind, "a result")
        raise UndoneStepError(f"step {batch.step_id} raised {kind}")

    def close(self) -> None:
        self._inner.close()


def compare(step_id: int, recorded: Any, replayed: Any) -> None:
    """Raise `ReplayDifference` for the first field of two structs that differs in any bit."""
    fields, others = fields_of(recorded), fields_of(replayed)
    for field, old in fields.items():
        new = others[field]
        # Their bytes differ also where == sees no difference, as with 0.0 and -0.0.
        if encoded(old) != encoded(new):
            raise ReplayDifference(step_id, field, *first_difference(old, new))


def fields_of(struct: Any) -> dict[str, Any]:
    """Return the fields of a struct; of a result, the fields of its rows by chunk."""
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    if isinstance(struct, StepResult):
        del fields["rows"]
        fields |= {name: struct.column(name) for name in RowResult.__struct_fields__}
    return fields


def encoded(value: Any) -> bytes:
    """Return the bytes of a value, independent of the order in which its dict or set was filled."""
    if isinstance(value, dict):
        value = sorted(value.items())
    return msgspec.msgpack.encode(sorted(value) if isinstance(value, set) else value)


def first_difference(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the first entries of two lists or dicts that differ, with their place; other values as they are."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            if encoded(pair[0]) != encoded(pair[1]):
                return {at: pair[0]}, {at: pair[1]}
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if key not in old or key not in new or encoded(old[key]) != encoded(new[key]):
                return {k: old[k] for k in (key,) if k in old}, {k: new[k] for k in (key,) if k in new}
    return old, new


def replay(
    records: Iterator[Record], core: EngineCore, speculator: Clocked | None = None, matchers: Waited | None = None
) -> Outcome:
    """Run `core` through the records after the head, and compare its steps with them.

    Args:
        core: a fresh engine, of the log's config.
        speculator, matchers: of its runner, if it has them.

    Raises `ReplayDifference`, `RecordingError`.
    """
    script = Script(speculator, matchers)
    checking = CheckingExecutor(core.executor, script)
    core.executor = checking
    outcome = Outcome(end="the process that wrote it was ended")
    plan: StepPlan | None = None
    for record in records:
        if plan is not None and not isinstance(record, LogEnd):
            end = record if isinstance(record, StepEnd | StepError) else None
            take_step(core, checking, plan, end, outcome)
            plan = None
            if end is not None:
                continue
        match record:
            case StepTimes():
                pass
            case Add(request):
                outcome.num_requests += 1
                # A request that was refused is refused again; the following records show whether that is so.
                with contextlib.suppress(RequestError):
                    core.add(request)
            case Abort(request_id):
                core.abort(request_id)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case StepPlan():
                plan = record
            case LogEnd(reason):
                outcome.end, plan = reason, None
            case StepEnd() | StepError() | LogHead():
                raise RecordingError(
                    f"a {str(type(record).__struct_config__.tag).capitalize()} where there can be none"
                )
    if plan is not None:
        outcome.unfinished = True
        take_step(core, checking, plan, None, outcome)
    return outcome


def take_step(
    core: EngineCore, checking: CheckingExecutor, plan: StepPlan, end: StepEnd | StepError | None, outcome: Outcome
) -> None:
    """Run one step and compare it with `plan` and `end`."""
    if not core.has_work():
        raise ReplayDifference(plan.step_id, "its being there", "a step", "nothing to do")
    checking.expected = plan, end
    try:
        core.step()
    except UndoneStepError:
        outcome.num_raised += 1
    checking.expected = None
    if not isinstance(end, StepEnd):
        return
    outcome.num_steps += 1
    result = end.result
    outcome.num_tokens += sum(token >= 0 for token in result.token_ids)
    for row in result.rows.values():
        outcome.num_tokens += len(row.further) + len(row.forced)
        outcome.num_logprobs += (row.logprob is not None) + len(row.further_logprobs) + len(row.prompt_logprobs)
