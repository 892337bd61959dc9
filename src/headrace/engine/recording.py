"""`Recorder`: an engine's life as a log, from which `replay` runs it again to the bit.

The log has what came in, and in which step; what the scheduler decided and what the executor gave; and what neither of
these decides: readings of the clock that the pace of speculation goes by, and which masks of grammars were late. It
holds the token ids of prompts and answers, so it is private. Each step is in the file before it is computed, so that
the deadly one is there too. `compose` makes a recorded engine; the core knows nothing of it.

The file is `MAGIC`, then frames: a 4-byte little-endian length and that many bytes of msgpack: the structs below
and what an engine is told.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.engine.core import EngineCore, Executor
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

MAGIC = b"headrace schedule 2\n"
NUM_KEPT = 4
"""Earlier recordings that are kept: one for each life of the engine."""
MAX_FRAME_BYTES = 2**28


class Head(msgspec.Struct, frozen=True, tag="head"):
    """First: the engine's config as msgpack, and what became of it. `time` is in seconds since 1970."""

    config: bytes
    info: EngineInfo
    time: float


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A decision: columns of `ScheduledBatch`. Of a table whose chunk is one token long only the last block is told:
    the others were told before."""

    step_id: int
    seq_ids: list[int]
    starts: list[int]
    lens: list[int]
    token_ids: list[int]
    samples: list[bool]
    tables: list[list[int]]
    copies: list[tuple[int, int]]
    drafts: dict[int, Draft]


class Made(msgspec.Struct, frozen=True, tag="made"):
    """What the step gave; the readings of the clock on the way, and the sequences whose masks were late each time that
    somebody waited for them."""

    result: StepResult
    times: list[float]
    late: list[list[int]]


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The step gave nothing: the executor raised an exception of this kind, and the scheduler took the step back."""

    kind: str


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The recording ends here, though the engine may have gone on."""

    reason: str


Record = Head | Add | Abort | ResetPrefixCache | Planned | Made | Raised | Closed


class Clocked(Protocol):
    """A speculator."""

    clock: Callable[[], float]


class Waited(Protocol):
    """The matchers of grammars."""

    def wait(self, seq_ids: list[int], others: bool) -> set[int]: ...


def planned(batch: ScheduledBatch) -> Planned:
    """What is written of a batch."""
    return Planned(
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
        path: the file, readable by its owner alone. What was there before is kept as path.1, path.2 ...
        most: bytes after which the recording ends.
        config: the engine's, as msgpack.
        is_restart: others wait for this engine, so it goes on without a file if there can be none.

    Raises `OSError` if there can be no such file, but for a restart. If writing fails later, the recording ends and the
    engine goes on.
    """

    def __init__(
        self, path: str, most: int, config: bytes, info: EngineInfo, now: float, is_restart: bool = False
    ) -> None:
        self.times: list[float] = []
        self.late: list[list[int]] = []
        self._most = most
        self._size = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._fd: int | None = None
        self._waiting = bytearray(MAGIC)
        try:
            self._begin_file(Path(path).expanduser(), Head(config, info, now))
        except OSError as error:
            self._release()
            if not is_restart:
                raise
            self._fail(error)

    @property
    def is_over(self) -> bool:
        """Nothing is written any more."""
        return self._fd is None

    def _begin_file(self, path: Path, head: Head) -> None:
        keep_earlier(path)
        self._fd = fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.put(head)
        try:
            self._write(fd)
        except OSError:
            # An empty file would only push out what was recorded before.
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def put(self, record: Record) -> None:
        """To be written with the next `flush`."""
        if self._fd is None:
            return
        waiting, start = self._waiting, len(self._waiting)
        waiting += bytes(4)
        try:
            self._encoder.encode_into(record, waiting, -1)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # such as a logits processor
            del waiting[start:]
            self.close(f"a request has something that can not be written down: {error}")
            return
        waiting[start : start + 4] = (len(waiting) - start - 4).to_bytes(4, "little")

    def begin(self, batch: ScheduledBatch) -> None:
        """A step is about to be computed."""
        if self._fd is not None:
            self.put(planned(batch))
            self.flush()

    def end(self, result: StepResult) -> None:
        """It was. Written with what comes next."""
        self.put(Made(result, self.times, self.late))
        self.times, self.late = [], []

    def flush(self) -> None:
        """Write what waits: one call of the system, so that the file outlives this process."""
        if self._fd is None or not self._waiting:
            return
        if self._size + len(self._waiting) > self._most:
            self._waiting.clear()
            self.close(f"it has {self._size} bytes, and at most {self._most} are written")
            return
        try:
            self._write(self._fd)
        except OSError as error:
            self._fail(error)

    def _write(self, fd: int) -> None:
        num = os.write(fd, self._waiting)
        if num < len(self._waiting):
            raise OSError(f"{num} of {len(self._waiting)} bytes were written")
        self._size += num
        self._waiting.clear()

    def _fail(self, error: OSError) -> None:
        self._waiting.clear()
        self._release()
        logger.error("the recording of the schedule has failed; the engine goes on without: %s", error)

    def _release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError as error:  # some file systems tell only now that there was no room
                logger.error("the recording of the schedule may lack its end: %s", error)

    def close(self, reason: str = "") -> None:
        """End the recording. May be called twice."""
        if self._fd is None:
            return
        if reason:
            logger.warning("the recording of the schedule ends: %s", reason)
            self._most = 2 * self._size + 2**12
        self.put(Closed(reason))
        self.flush()
        self._release()


def keep_earlier(path: Path) -> None:
    """Move the recording at `path` to path.1, that to path.2, and so on; the oldest goes."""
    names = [path, *(path.with_name(f"{path.name}.{num}") for num in range(1, NUM_KEPT + 1))]
    # Up to the first that is missing: there is room for what comes before it.
    num = next((num for num, name in enumerate(names) if not name.is_file()), NUM_KEPT)
    for older, newer in zip(reversed(names[1 : num + 1]), reversed(names[:num]), strict=True):
        newer.replace(older)


class RecordingExecutor:
    """An executor whose steps are written down."""

    def __init__(self, inner: Executor, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def run(self, batch: ScheduledBatch) -> StepResult:
        self._recorder.begin(batch)
        try:
            result = self._inner.run(batch)
        except BaseException as error:
            self._recorder.put(Raised(type(error).__name__))
            self._recorder.flush()
            raise
        self._recorder.end(result)
        return result

    def close(self) -> None:
        self._inner.close()


class RecordedEngine(EngineCore):
    """An engine that is written down. Takes the arguments of `EngineCore` after its own."""

    def __init__(
        self, recorder: Recorder, speculator: Clocked | None, matchers: Waited | None, *parts: Any, **more: Any
    ) -> None:
        super().__init__(*parts, **more)
        self.executor = RecordingExecutor(self.executor, recorder)
        self._recorder = recorder
        if speculator is not None:
            self._tap_clock(speculator)
        if matchers is not None:
            self._tap_masks(matchers)

    def add(self, request: Request) -> None:
        self._recorder.put(Add(request))
        super().add(request)

    def abort(self, request_id: str) -> bool:
        self._recorder.put(Abort(request_id))
        return super().abort(request_id)

    def reset_prefix_cache(self) -> None:
        self._recorder.put(ResetPrefixCache())
        super().reset_prefix_cache()

    def step(self) -> StepOutput:
        output = super().step()
        if not self.has_work():
            self._recorder.flush()
        output.stats = output.stats and self._counted(output.stats)
        return output

    def stats(self) -> Stats:
        return self._counted(super().stats())

    def _counted(self, stats: Stats) -> Stats:
        return msgspec.structs.replace(stats, num_recordings_ended=1) if self._recorder.is_over else stats

    def close(self) -> None:
        super().close()
        self._recorder.close()

    def _tap_clock(self, speculator: Clocked) -> None:
        real, recorder = speculator.clock, self._recorder

        def clock() -> float:
            now = real()
            recorder.times.append(now)
            return now

        speculator.clock = clock

    def _tap_masks(self, matchers: Waited) -> None:
        real, recorder = matchers.wait, self._recorder

        def wait(seq_ids: list[int], others: bool) -> set[int]:
            late = real(seq_ids, others)
            recorder.late.append(sorted(late))
            return late

        matchers.wait = wait  # type: ignore[method-assign]
