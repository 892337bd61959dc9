"""The program of a model whose layers several ranks share out: `PipelinedProgram` on rank 0, `follow_stage` on others.

A call is cut into pieces of rows, which pass the stages one after the other, so that several stages work at a time. The
cuts depend on the call alone, so that every rank computes them by itself; hidden rows pass between stages as float32.
Rank 0 has the last layers, so the model's outputs and everything computed from them are there. Knows programs and
messages; must not know requests, processes or sockets. Called by `engine.ranks` and `engine.rank`.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import queue
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Program
from headrace.backends.reads import ReadRows
from headrace.backends.step import Chunks
from headrace.parallel.program import (
    Call,
    CopyBlocks,
    Fault,
    Forward,
    HiddenRows,
    Numbers,
    OtherRanks,
    Passed,
    RankLostError,
)

if TYPE_CHECKING:
    from headrace.backends.step import Logits

logger = logging.getLogger("headrace.engine")

F32 = NDArray[np.float32]
T = TypeVar("T")
GLANCE_S = 0.1
"""Seconds after which a rank that waits for rows looks whether the others are still there."""
MAX_PIECES = 2**31
READ_ROWS = 8
"""About the number of rows that take a stage as long as it takes to read its weights (`python -m bench.ranks
--pipeline`)."""


def rows_of(message: HiddenRows, num_rows: int, width: int) -> F32:
    """Return the rows of a message. Raises `RankLostError` for another number or width than expected."""
    if message.width != width or len(message.data) != 4 * num_rows * width:
        raise RankLostError(
            f"the ranks are apart: {len(message.data)} bytes of rows of {message.width} numbers, expected {num_rows} "
            f"rows of {width}"
        )
    return np.frombuffer(message.data, "<f4").reshape(num_rows, width)


def message_of(call_id: int, piece: int, rows: F32) -> HiddenRows:
    return HiddenRows(call_id, piece, rows.shape[1], rows.astype("<f4", copy=False).tobytes())


class StageProgram(Program, Protocol):
    """A program with the further methods that a stage needs: `backends.cpu.program.TapedProgram`."""

    def hidden_rows(self, chunks: Chunks, features: F32 | None = None) -> tuple[list[bool], F32]: ...

    def logits_of(self, hidden: F32, rows: list[int]) -> Logits: ...


Take = Callable[[int, int], Passed]
"""Takes a call's number and a piece's number; waits for that piece from the stage before."""


def error_of(fault: Fault) -> Exception:
    """Return the error of a call that another rank could not compute: `MemoryError` for lack of memory (R-25)."""
    text = f"{fault.kind} on another rank: {fault.message}"
    return MemoryError(text) if fault.kind == "MemoryError" else RuntimeError(text)


# Pieces of a call.


class Piece(NamedTuple):
    """Some rows of a call: its chunk c is, or is part of, chunk `first` + c of the call."""

    first: int
    chunks: Chunks


def num_pieces(num_rows: int, world: int) -> int:
    """Return the number of pieces of a call of so many rows.

    n rows in P pieces pass W stages in P + W - 1 turns, each of which takes the time of reading the weights and of
    computing n / P rows; the total is least at P = sqrt((W - 1) * n / rows that take as long as the weights).
    """
    return max(1, round(math.sqrt((world - 1) * num_rows / READ_ROWS)))


def cut(chunks: Chunks, world: int) -> list[Piece]:
    """Cut a call into pieces of about as many rows, in order; a cut may go through a chunk.

    If a chunk with a state is cut, the state is kept in the slot of `states_out` that follows; where there is none, the
    piece goes on to the end of the chunk.
    """
    begins = [0, *itertools.accumulate(map(len, chunks.token_ids))]
    total = begins[-1]
    number = num_pieces(total, world)
    if number == 1:
        return [Piece(0, chunks)]
    slots = dict(chunks.states_out)

    def slot_at(row: int) -> int:
        """Return where the state before a row within a chunk is kept, or -1."""
        end = begins[bisect.bisect_right(begins, row)]
        return next((slots[at] for at in range(row - 1, end) if at in slots), -1)

    ends: list[int] = []
    for i in range(1, number + 1):
        end = total * i // number
        place = bisect.bisect_left(begins, end)
        if chunks.states_in and begins[place] != end and slot_at(end) < 0:
            end = begins[place]
        if not ends or end > ends[-1]:
            ends.append(end)

    def piece(first: int, last: int) -> Piece:
        ids = range(bisect.bisect_right(begins, first) - 1, bisect.bisect_left(begins, last))
        skips = [max(0, first - begins[c]) for c in ids]
        reads, writes = [], [(row - first, slot) for row, slot in chunks.states_out if first <= row < last]
        if chunks.states_in:
            reads = [slot_at(first) if skip else chunks.states_in[c] for c, skip in zip(ids, skips, strict=True)]
            if last < begins[ids[-1] + 1] and last - 1 not in slots:
                writes.append((last - 1 - first, slot_at(last)))
        part = Chunks(
            [chunks.starts[c] + skip for c, skip in zip(ids, skips, strict=True)],
            [chunks.token_ids[c][skip : last - begins[c]] for c, skip in zip(ids, skips, strict=True)],
            [chunks.tables[c] for c in ids],
            [(row - first, slot) for row, slot in chunks.copies if first <= row < last],
            [[tables[c] for c in ids] for tables in chunks.more_tables],
            reads,
            writes,
            [row - first for row in chunks.later if first <= row < last],
        )
        return Piece(ids[0], part)

    return list(itertools.starmap(piece, itertools.pairwise([0, *ends])))


def num_rows_of(chunks: Chunks) -> int:
    return sum(map(len, chunks.token_ids))


# The two ends of a call.


class PipelinedProgram:
    """Rank 0's `program`, the last stage, with the other ranks' stages before it. `take` waits for a piece of a call,
    by their numbers."""

    def __init__(self, program: StageProgram, others: OtherRanks, take: Take, world: int) -> None:
        self._program, self._others, self._take, self._world = program, others, take, world
        # Of the last call, if it had several pieces: the program has its rows by their places.
        self._read: ReadRows | None = None
        self.model = program.model
        self.vocab_size, self.block_size = program.vocab_size, program.block_size
        self.kinds, self.pool_sizes, self.num_blocks = program.kinds, program.pool_sizes, program.num_blocks
        self.max_rows, self.max_logits = program.max_rows, program.max_logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        if pairs:
            self._others.send(CopyBlocks(self._others.begin(), pairs, kind))
        self._program.copy_blocks(pairs, kind)

    def forward(self, chunks: Chunks, rows: list[int], features: F32 | None = None) -> tuple[list[bool], Logits]:
        if features is not None:
            raise ValueError("ranks compute no drafters, which alone take features")
        call_id = self._others.begin()
        self._others.send(Forward.of(call_id, chunks, []))
        read = ReadRows(chunks, rows)
        pieces = cut(chunks._replace(later=read.rows().tolist()), self._world)
        self._read = None if len(pieces) == 1 else read
        if len(pieces) == 1:
            return self._program.forward(chunks, rows, self._taken(call_id, 0, num_rows_of(chunks)))
        # The program keeps the hidden states of its last call: at the end all pieces' states are put back into it.
        hidden = np.empty((read.num_read, self.model.hidden_size), np.float32)
        are_finite, place = [True] * len(chunks.starts), 0
        for number, piece in enumerate(pieces):
            passed = self._taken(call_id, number, num_rows_of(piece.chunks))
            finite, states = self._program.hidden_rows(piece.chunks, passed)
            hidden[place : place + len(states)] = states
            for c, is_finite in enumerate(finite, piece.first):
                are_finite[c] &= is_finite
            place += len(states)
        return are_finite, self._program.logits_of(hidden, read.places(rows))

    def _taken(self, call_id: int, piece: int, num_rows: int) -> F32:
        passed = self._take(call_id, piece)
        if isinstance(passed, Fault):
            raise error_of(passed)
        return rows_of(passed, num_rows, self.model.feature_size)

    def logits(self, rows: list[int]) -> Logits:
        return self._program.logits(self._places(rows))

    def hidden_states(self, rows: list[int]) -> F32:
        return self._program.hidden_states(self._places(rows))

    def _places(self, rows: list[int]) -> list[int]:
        """Return the rows of the last call as the program numbers them."""
        return rows if self._read is None else self._read.places(rows)

    def features(self, rows: list[int]) -> F32:
        raise ValueError("ranks keep no features for drafters")

    def close(self) -> None:
        self._others.close()
        self._program.close()


def follow_stage(
    program: StageProgram,
    world: int,
    receive: Callable[[], Call | None],
    take: Take | None,
    give: Callable[[Passed], None],
) -> None:
    """Make rank 0's calls until `receive` returns None, and hand on hidden rows. `take`: None for the first stage.

    A call that fails here is handed on as a `Fault`, and rank 0 decides how to go on.
    """
    while (call := receive()) is not None:
        match call:
            case CopyBlocks(_, pairs, kind):
                program.copy_blocks(pairs, kind)
            case Forward():
                give_rows(program, world, call, take, give)
            case _:
                raise RankLostError(f"a stage makes no call {type(call).__name__}")


def give_rows(
    program: StageProgram, world: int, call: Forward, take: Take | None, give: Callable[[Passed], None]
) -> None:
    """Compute one call, piece by piece, and hand on the rows of each."""
    call_id = call.call_id
    for number, piece in enumerate(cut(call.chunks(), world)):
        features = None
        if take is not None:
            passed = take(call_id, number)
            if isinstance(passed, Fault):
                give(passed)
                return
            features = rows_of(passed, num_rows_of(piece.chunks), program.model.feature_size)
        try:
            _, hidden = program.hidden_rows(piece.chunks.all_read(), features)
        except Exception as error:
            logger.warning("a call failed on this rank", exc_info=error)
            give(Fault(call_id, type(error).__name__, str(error)))
            return
        give(message_of(call_id, number, hidden))


def in_turn(receive: Callable[[], Passed], call_id: int, piece: int) -> Passed:
    """Return the message that `receive` gives for a piece of a call. Messages of earlier calls, which failed, are
    dropped.

    Raises `RankLostError` for anything else: the ranks make other calls.
    """
    while True:
        passed = receive()
        if passed.call_id == call_id and (isinstance(passed, Fault) or passed.piece == piece):
            return passed
        if passed.call_id >= call_id:
            raise RankLostError(
                f"the ranks are apart: rows of call {passed.call_id}, expected piece {piece} of call {call_id}: "
                "they are out of step"
            )


# The connections, as rank 0 sees them, and as the other ranks see them.


class Connections(Protocol):
    """The other ranks: `parallel.group.Group`."""

    world: int

    def receive(self, rank: int, kind: type[T]) -> T:
        """Wait for a message of a rank, while the model is loaded. Raises `RankLostError`, or the rank's error."""
        ...

    def send(self, call: msgspec.Struct) -> None: ...

    def send_to(self, rank: int, message: msgspec.Struct) -> None: ...

    def check(self) -> None:
        """Raise `RankLostError` if the group is of no use any more."""
        ...

    def lose(self, reason: str) -> None: ...


class FirstNeighbours:
    """`Neighbours` of rank 0, which has the last layers; it passes messages between the other ranks."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def take(self, num_rows: int, width: int) -> F32 | None:
        last = self._connections.world - 1
        for rank in range(1, last):
            self._connections.send_to(rank + 1, self._connections.receive(rank, HiddenRows))
        return rows_of(self._connections.receive(last, HiddenRows), num_rows, width)

    def give(self, rows: F32) -> None:
        """Do nothing: there are no layers behind."""

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        others = [self._connections.receive(rank, Numbers).values[0] for rank in range(1, self._connections.world)]
        every = [*others, list(values)]
        self._connections.send(Numbers(every))
        return every


class RankNeighbours:
    """`Neighbours` of another rank. `expect` waits for a message of rank 0, `send` sends it one."""

    def __init__(self, rank: int, expect: Callable[[type[Any]], Any], send: Callable[[msgspec.Struct], None]) -> None:
        self._rank, self._expect, self._send = rank, expect, send

    def take(self, num_rows: int, width: int) -> F32 | None:
        return rows_of(self._expect(HiddenRows), num_rows, width) if self._rank > 1 else None

    def give(self, rows: F32) -> None:
        self._send(message_of(0, 0, rows))

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        self._send(Numbers([list(values)]))
        every: list[list[float]] = self._expect(Numbers).values
        return every


class Arrivals:
    """The messages of stages while calls are made: handed on to the next one, or to rank 0, whose `take` waits.

    `arrived` is called on the thread that reads the connections, `take` on the thread that makes the calls.
    """

    def __init__(self, connections: Connections, timeout: float) -> None:
        self._connections, self._timeout = connections, timeout
        self._queue = queue.SimpleQueue[Passed]()
        self._last = [(-1, -1)] * connections.world

    def arrived(self, rank: int, message: Passed) -> None:
        self._last[rank] = (message.call_id, MAX_PIECES if isinstance(message, Fault) else message.piece)
        if rank + 1 < self._connections.world:
            self._connections.send_to(rank + 1, message)
        else:
            self._queue.put(message)

    def take(self, call_id: int, piece: int) -> Passed:
        """Wait for a piece of a call. Raises `RankLostError` after `timeout` seconds, or when a rank is lost."""
        end = time.monotonic() + self._timeout

        def receive() -> Passed:
            while True:
                try:
                    return self._queue.get(timeout=GLANCE_S)
                except queue.Empty:
                    self._connections.check()
                    if time.monotonic() < end:
                        continue
                    late = next((r for r, last in enumerate(self._last) if r and last < (call_id, piece)), 0)
                    self._connections.lose(f"timeout: rank {late} gave no rows for {self._timeout:g} s")
                    self._connections.check()

        return in_turn(receive, call_id, piece)
