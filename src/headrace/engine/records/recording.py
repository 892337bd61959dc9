"""`Recorder` writes the life of an engine to a log, from which `replay` runs it again, equal in every bit.

The log has the requests, when and before which step each came; the scheduler's decisions and the executor's results,
and when; and the inputs of neither: readings of the clock that control speculation, and which masks of grammars were
late. It holds the
token ids of prompts and answers, so it is private. Each step is in the file before it is computed, so that a step that
killed the engine is there too. `engine.build` makes a recorded engine; the core does not know of it.

The file is `MAGIC`, then frames: a 4-byte little-endian length and that many bytes of msgpack: the structs below and
the messages to the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.journal import Journal, arrival_times
from headrace.engine.core import EngineCore, Executor, Ticket
from headrace.protocol.pictures import unseen
from headrace.protocol.step import (
    Abort,
    Add,
    Draft,
    EngineInfo,
    Request,
    ResetPrefixCache,
    ScheduledBatch,
    Stats,
    StepOutput,
    StepResult,
)

logger = logging.getLogger("headrace.engine")

MAGIC = b"headrace schedule 3\n"
NUM_KEPT = 4
"""Earlier recordings that are kept, one for each life of the engine."""
MAX_FRAME_BYTES = 2**28


class LogHead(msgspec.Struct, frozen=True, tag="head"):
    """The first record: the engine's config as msgpack, and its `EngineInfo`. `time` is in seconds since 1970."""

    config: bytes
    info: EngineInfo
    time: float


class StepPlan(msgspec.Struct, frozen=True, tag="planned"):
    """A decision of the scheduler: columns of `ScheduledBatch`. A table whose chunk is one token long has only its last
    block here: the others are in earlier records."""

    step_id: int
    seq_ids: list[int]
    starts: list[int]
    lens: list[int]
    token_ids: list[int]
    samples: list[bool]
    tables: list[list[int]]
    copies: list[tuple[int, int]]
    drafts: dict[int, Draft]


class StepEnd(msgspec.Struct, frozen=True, tag="made"):
    """The result of a step, the readings of the clock in it, and the sequences whose masks were late at each wait."""

    result: StepResult
    times: list[float]
    late: list[list[int]]


class StepTimes(msgspec.Struct, frozen=True, tag="timed"):
    """When a step began, was scheduled, computed and ended, in monotonic seconds. Follows its `StepEnd`."""

    step_id: int
    times: tuple[float, float, float, float]


class StepError(msgspec.Struct, frozen=True, tag="raised"):
    """A step without a result: the executor raised an exception of this kind, and the scheduler undid the step."""

    kind: str


class LogEnd(msgspec.Struct, frozen=True, tag="closed"):
    """The end of the recording; the engine may have gone on."""

    reason: str


Record = LogHead | Add | Abort | ResetPrefixCache | StepPlan | StepEnd | StepTimes | StepError | LogEnd


class Clocked(Protocol):
    """A speculator, which reads a clock."""

    clock: Callable[[], float]


class Waited(Protocol):
    """The matchers of grammars, whose masks may be late."""

    def wait(self, seq_ids: list[int], others: bool) -> set[int]: ...


def plan_of(batch: ScheduledBatch) -> StepPlan:
    """Return the record of a batch."""
    return StepPlan(
        batch.step_id,
        batch.seq_ids,
        batch.starts,
        batch.lens,
        batch.token_ids,
        batch.samples,
        [table if num > 1 else table[-1:] for table, num in zip(batch.block_tables, batch.lens, strict=True)],
        batch.copies,
        batch.drafts,
    )


class Recorder:
    """Writes one log.

    Args:
        path: the file, readable by its owner alone. Earlier files are kept as path.1, path.2 ...
        max_bytes: bytes after which the recording ends.
        config: the engine's, as msgpack.
        is_restart: requests wait for this engine, so it goes on even if the file cannot be made.

    Raises `OSError` if the file cannot be made, except for a restart. If writing fails later, the recording ends and
    the engine goes on.
    """

    def __init__(
        self, path: str, max_bytes: int, config: bytes, info: EngineInfo, now: float, is_restart: bool = False
    ) -> None:
        self.times: list[float] = []
        self.late: list[list[int]] = []
        self._max_bytes = max_bytes
        self._size = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._fd: int | None = None
        self._unwritten = bytearray(MAGIC)
        try:
            self._begin_file(Path(path).expanduser(), LogHead(config, info, now))
        except OSError as error:
            self._release()
            if not is_restart:
                raise
            self._fail(error)

    @property
    def is_over(self) -> bool:
        """Whether the recording has ended."""
        return self._fd is None

    def _begin_file(self, path: Path, head: LogHead) -> None:
        keep_earlier(path)
        self._fd = fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.put(head)
        try:
            self._write(fd)
        except OSError:
            # An empty file would only displace an earlier recording.
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def put(self, record: Record) -> None:
        """Add a record, which the next `flush` writes."""
        if self._fd is None:
            return
        unwritten, start = self._unwritten, len(self._unwritten)
        unwritten += bytes(4)
        try:
            self._encoder.encode_into(record, unwritten, -1)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # such as a logits processor
            del unwritten[start:]
            self.close(f"a request has something that can not be written down: {error}")
            return
        unwritten[start : start + 4] = (len(unwritten) - start - 4).to_bytes(4, "little")

    def begin(self, batch: ScheduledBatch) -> None:
        """Record a step that is about to be computed."""
        if self._fd is not None:
            self.put(plan_of(batch))
            self.flush()

    def end(self, result: StepResult) -> None:
        """Record the result of the step. It is written with the next step."""
        self.put(StepEnd(result, self.times, self.late))
        self.times, self.late = [], []

    def flush(self) -> None:
        """Write the records that wait, in one system call, so that they outlive this process."""
        if self._fd is None or not self._unwritten:
            return
        if self._size + len(self._unwritten) > self._max_bytes:
            self._unwritten.clear()
            self.close(f"it has {self._size} bytes, and at most {self._max_bytes} are written")
            return
        try:
            self._write(self._fd)
        except OSError as error:
            self._fail(error)

    def _write(self, fd: int) -> None:
        num = os.write(fd, self._unwritten)
        if num < len(self._unwritten):
            raise OSError(f"{num} of {len(self._unwritten)} bytes were written")
        self._size += num
        self._unwritten.clear()

    def _fail(self, error: OSError) -> None:
        self._unwritten.clear()
        self._release()
        logger.error("the recording of the schedule has failed; the engine goes on without: %s", error)

    def _release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError as error:  # some file systems report a full disk only now
                logger.error("the recording of the schedule may lack its end: %s", error)

    def close(self, reason: str = "") -> None:
        """End the recording. May be called twice."""
        if self._fd is None:
            return
        if reason:
            logger.warning("the recording of the schedule ends: %s", reason)
            self._max_bytes = 2 * self._size + 2**12
        self.put(LogEnd(reason))
        self.flush()
        self._release()


def keep_earlier(path: Path) -> None:
    """Move the recording at `path` to path.1, that to path.2, and so on; the oldest is deleted."""
    names = [path, *(path.with_name(f"{path.name}.{num}") for num in range(1, NUM_KEPT + 1))]
    # Up to the first that is missing, which makes room for those before it.
    num = next((num for num, name in enumerate(names) if not name.is_file()), NUM_KEPT)
    for older, newer in zip(reversed(names[1 : num + 1]), reversed(names[:num]), strict=True):
        newer.replace(older)


class RecordingExecutor(Executor):
    """An executor whose steps are recorded."""

    def __init__(self, inner: Executor, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def start(self, batch: ScheduledBatch) -> Ticket:
        self._recorder.begin(batch)
        with self._errors():
            return self._inner.start(batch)

    def finish(self, ticket: Ticket) -> StepResult:
        with self._errors():
            result = self._inner.finish(ticket)
        self._recorder.end(result)
        return result

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._recorder.put(StepError(type(error).__name__))
            self._recorder.flush()
            raise

    def close(self) -> None:
        self._inner.close()


def _recorded(request: Request) -> Request:
    return msgspec.structs.replace(request, pictures=unseen(request.pictures)) if request.pictures else request


class RecordedEngine(EngineCore):
    """An engine that is recorded. Takes the arguments of `EngineCore` after its own."""

    def __init__(
        self, recorder: Recorder, speculator: Clocked | None, matchers: Waited | None, *parts: Any, **more: Any
    ) -> None:
        super().__init__(*parts, **more)
        self.executor = RecordingExecutor(self.executor, recorder)
        self._recorder = recorder
        self.journal = Journal(self.scheduler, self.clock)
        if speculator is not None:
            self._record_clock(speculator)
        if matchers is not None:
            self._record_masks(matchers)

    def add(self, request: Request, times: Sequence[float] = ()) -> None:
        times = arrival_times(times, self.clock())
        self._recorder.put(Add(_recorded(request), times))
        super().add(request, times)

    def abort(self, request_id: str) -> bool:
        self._recorder.put(Abort(request_id))
        return super().abort(request_id)

    def reset_prefix_cache(self) -> None:
        self._recorder.put(ResetPrefixCache())
        super().reset_prefix_cache()

    def step(self) -> StepOutput:
        output = super().step()
        if self.journal is not None and self.journal.last is not None:
            self._recorder.put(StepTimes(output.step_id, self.journal.last.step.times))
        if not self.has_work():
            self._recorder.flush()
        output.stats = output.stats and self._with_end(output.stats)
        return output

    def stats(self) -> Stats:
        return self._with_end(super().stats())

    def _with_end(self, stats: Stats) -> Stats:
        return msgspec.structs.replace(stats, num_recordings_ended=1) if self._recorder.is_over else stats

    def close(self) -> None:
        super().close()
        self._recorder.close()

    def _record_clock(self, speculator: Clocked) -> None:
        read_clock, recorder = speculator.clock, self._recorder

        def clock() -> float:
            now = read_clock()
            recorder.times.append(now)
            return now

        speculator.clock = clock

    def _record_masks(self, matchers: Waited) -> None:
        inner_wait, recorder = matchers.wait, self._recorder

        def wait(seq_ids: list[int], others: bool) -> set[int]:
            late = inner_wait(seq_ids, others)
            recorder.late.append(sorted(late))
            return late

        matchers.wait = wait  # type: ignore[method-assign]
