"""Runs a recorded engine again (`recording`), and says in which step it first does otherwise.

What came in is told to an engine of the same config before the same steps; the clock and the lateness of masks are the
recorded ones. All else, what is decided and what is computed, the engine does anew, and each step is compared with the
log: the same chunks of the same sequences in the same blocks, the same tokens, the same bits of log-probabilities.
`cli.replay` builds the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headrace.engine.core import EngineCore, Executor
from headrace.engine.recording import (
    MAGIC,
    MAX_FRAME_BYTES,
    Clocked,
    Closed,
    Head,
    Made,
    Planned,
    Raised,
    Record,
    Waited,
    planned,
)
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.step import Abort, Add, ResetPrefixCache, ScheduledBatch, StepResult

SHOWN_CHARS = 200
INTERRUPTS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
"""What comes from outside, at no step in particular."""


class RecordingError(HeadraceError):
    """The file is no recording, or a part of it is damaged."""

    code = "bad_recording"


class Difference(HeadraceError):
    """The replay did something else than the log says. `step_id` is the first step that differs."""

    code = "replay_differs"

    def __init__(self, step_id: int, what: str, recorded: object, replayed: object) -> None:
        self.step_id = step_id
        self.what = what
        told = f"the log has {shown(recorded)}, the replay {shown(replayed)}"
        super().__init__(f"step {step_id} differs in {what}: {told}")


class TakenBackError(HeadraceError):
    """A step of the replay raised what the recorded one did."""


def shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " ..."


class Outcome(msgspec.Struct):
    """What was replayed without a difference. `unfinished`: the log ends in the middle of a step, which was run here
    too; `end` is why the log ends where it does, as far as it says."""

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0
    num_raised: int = 0
    unfinished: bool = False
    end: str = ""


def read(path: Path) -> Iterator[Record]:
    """The records of a log, the `Head` first. What was cut off in the middle, by the death of its writer, is left out.

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
            if first != isinstance(record, Head):
                raise RecordingError(f"{path}: a log begins with its head, and has one")
            first = False
            yield record
    if first:
        raise RecordingError(f"{path} has no head")


class Script:
    """The clock and the lateness of masks, as they were in a step."""

    def __init__(self, speculator: Clocked | None, matchers: Waited | None) -> None:
        self.times: list[float] | None = None
        self.late: list[list[int]] | None = None
        self._num_times = 0
        self._num_late = 0
        if speculator is not None:
            speculator.clock = self._clock
        if matchers is not None:
            self._wait = matchers.wait
            matchers.wait = self._who_is_late  # type: ignore[method-assign]

    def begin(self, made: Made | None) -> None:
        """A step begins. None: nothing is known of it, so clock and masks are real."""
        self.times, self.late = (None, None) if made is None else (made.times, made.late)
        self._num_times = self._num_late = 0

    def end(self, step_id: int) -> None:
        """Raises `Difference` if the step asked more or less often than it did."""
        for what, script, num in (("clock", self.times, self._num_times), ("masks", self.late, self._num_late)):
            if script is not None and len(script) != num:
                raise Difference(step_id, f"how often it asked for the {what}", len(script), num)

    # Nothing is raised from here: the runner would take it for a fault of a request.

    def _clock(self) -> float:
        self._num_times += 1
        if self.times is None:
            return time.monotonic()
        return self.times[min(self._num_times, len(self.times)) - 1] if self.times else 0.0

    def _who_is_late(self, seq_ids: list[int], others: bool) -> set[int]:
        self._num_late += 1
        if self.late is None or self._num_late > len(self.late):
            return self._wait(seq_ids, others)
        return set(self.late[self._num_late - 1])


class CheckingExecutor:
    """An executor that compares each step with the log."""

    def __init__(self, inner: Executor, script: Script) -> None:
        self.expected: tuple[Planned, Made | Raised | None] | None = None
        self._inner = inner
        self._script = script

    def run(self, batch: ScheduledBatch) -> StepResult:
        if self.expected is None:
            raise Difference(batch.step_id, "its being there", "no such step", "one")
        plan, made = self.expected
        compare(plan.step_id, plan, planned(batch))
        if isinstance(made, Raised):
            self._raise_again(batch, made.kind)
        self._script.begin(made)
        result = self._inner.run(batch)
        if made is not None:
            compare(plan.step_id, made.result, result)
            self._script.end(plan.step_id)
        return result

    def _raise_again(self, batch: ScheduledBatch, kind: str) -> NoReturn:
        if kind not in INTERRUPTS:
            self._script.begin(None)
            try:
                self._inner.run(batch)
            except Exception as error:
                if type(error).__name__ != kind:
                    raise Difference(batch.step_id, "what it raised", kind, type(error).__name__) from error
            else:
                raise Difference(batch.step_id, "its end", kind, "a result")
        raise TakenBackError(f"step {batch.step_id} raised {kind}")

    def close(self) -> None:
        self._inner.close()


def compare(step_id: int, recorded: Any, replayed: Any) -> None:
    """Raises `Difference` for the first field of two structs that differs in any bit."""
    for field in recorded.__struct_fields__:
        ours, theirs = getattr(recorded, field), getattr(replayed, field)
        # Written down they differ also where == does not see it, as with 0.0 and -0.0.
        if written(ours) != written(theirs):
            raise Difference(step_id, field, *first_difference(ours, theirs))


def written(value: Any) -> bytes:
    """The bytes of a value, whatever order its dict or set was filled in."""
    if isinstance(value, dict):
        value = sorted(value.items())
    return msgspec.msgpack.encode(sorted(value) if isinstance(value, set) else value)


def first_difference(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """The first entries of two lists or dicts that are not the same, with their place; other values as they are."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, pair in enumerate(zip(ours, theirs, strict=True)):
            if written(pair[0]) != written(pair[1]):
                return {at: pair[0]}, {at: pair[1]}
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            if key not in ours or key not in theirs or written(ours[key]) != written(theirs[key]):
                return {k: ours[k] for k in (key,) if k in ours}, {k: theirs[k] for k in (key,) if k in theirs}
    return ours, theirs


def replay(
    records: Iterator[Record], core: EngineCore, speculator: Clocked | None = None, matchers: Waited | None = None
) -> Outcome:
    """Run `core` through the records after the head, and compare.

    Args:
        core: fresh, of the log's config.
        speculator, matchers: of its runner, if it has them.

    Raises `Difference`, `RecordingError`.
    """
    script = Script(speculator, matchers)
    checking = CheckingExecutor(core.executor, script)
    core.executor = checking
    outcome = Outcome(end="the process that wrote it was ended")
    plan: Planned | None = None
    for record in records:
        if plan is not None and not isinstance(record, Closed):
            made = record if isinstance(record, Made | Raised) else None
            take_step(core, checking, plan, made, outcome)
            plan = None
            if made is not None:
                continue
        match record:
            case Add(request):
                outcome.num_requests += 1
                # Who was refused then is refused now: what follows in the log shows whether that is so.
                with contextlib.suppress(RequestError):
                    core.add(request)
            case Abort(request_id):
                core.abort(request_id)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case Planned():
                plan = record
            case Closed(reason):
                outcome.end, plan = reason, None
            case Made() | Raised() | Head():
                raise RecordingError(f"a {type(record).__name__} where there can be none")
    if plan is not None:
        outcome.unfinished = True
        take_step(core, checking, plan, None, outcome)
    return outcome


def take_step(
    core: EngineCore, checking: CheckingExecutor, plan: Planned, made: Made | Raised | None, outcome: Outcome
) -> None:
    """One step, compared with `plan` and `made`."""
    if not core.has_work():
        raise Difference(plan.step_id, "its being there", "a step", "nothing to do")
    checking.expected = plan, made
    try:
        core.step()
    except TakenBackError:
        outcome.num_raised += 1
    checking.expected = None
    if not isinstance(made, Made):
        return
    outcome.num_steps += 1
    result = made.result
    outcome.num_tokens += sum(token >= 0 for token in result.token_ids)
    outcome.num_tokens += sum(map(len, result.further.values())) + sum(map(len, result.forced.values()))
    outcome.num_logprobs += len(result.logprobs) + sum(map(len, result.further_logprobs.values()))
    outcome.num_logprobs += sum(map(len, result.prompt_logprobs.values()))
