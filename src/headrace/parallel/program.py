"""The program of a model that several ranks compute: `RankedProgram` on rank 0, `follow` on each other one.

Rank 0 schedules, samples and drafts as one process does. What it sends to the others are the calls of its program, as
ints; each rank makes the call by itself over the heads that it has, and they meet in the gathers. Knows programs and
messages; must not know requests, processes or sockets. Called by `engine.ranks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.backends.base import Chunks
from headrace.protocol.errors import EngineDeadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.backends.base import Program
    from headrace.backends.logits import Logits

logger = logging.getLogger("headrace.engine")


class RankLostError(EngineDeadError):
    """The ranks of a model no longer compute together: one of them ended, stands still, or makes other calls."""


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """`Program.forward`: the fields of `Chunks`, then the rows of logits."""

    call_id: int
    starts: list[int]
    token_ids: list[list[int]]
    tables: list[list[int]]
    copies: Sequence[tuple[int, int]]
    more_tables: Sequence[Sequence[list[int]]]
    states_in: Sequence[int]
    states_out: Sequence[tuple[int, int]]
    rows: list[int]


class LogitsOf(msgspec.Struct, frozen=True, tag="logits"):
    """`Program.logits`."""

    call_id: int
    rows: list[int]


class HiddenStatesOf(msgspec.Struct, frozen=True, tag="hidden_states"):
    """`Program.hidden_states`."""

    call_id: int
    rows: list[int]


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy_blocks"):
    """`Program.copy_blocks`."""

    call_id: int
    pairs: Sequence[tuple[int, int]]
    kind: int


class HiddenRows(msgspec.Struct, frozen=True, tag="hidden_rows"):
    """From one stage to the next: hidden rows [R, width] of piece `piece` of a call, as float32 in little-endian."""

    call_id: int
    piece: int
    width: int
    data: bytes


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """From one stage to the next, in place of the rows of a call that are not there: a rank could not compute it."""

    call_id: int
    kind: str
    message: str


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """While a model is loaded: the values of one rank to rank 0, or those of all ranks from it, by stage."""

    values: list[list[float]]


Passed = HiddenRows | Fault
"""What goes from stage to stage."""


Call = Forward | LogitsOf | HiddenStatesOf | CopyBlocks


class Meeting(Protocol):
    """Where this rank's gathers meet those of the others: the native group."""

    def begin(self, call_id: int) -> None: ...

    def fault(self) -> str: ...


class Followers(Protocol):
    """The other ranks, as rank 0 sees them."""

    def begin(self) -> int:
        """Number the next call, and return the number."""
        ...

    def send(self, call: Call) -> None:
        """Send a call to all of them. Raises `RankLostError`."""
        ...

    def check(self) -> None:
        """Raise `RankLostError` if what was gathered is of no use."""
        ...

    def close(self) -> None: ...


class RankedProgram:
    """`program`, of rank 0, with the same calls on all other ranks."""

    def __init__(self, program: Program, followers: Followers) -> None:
        self._program, self._followers = program, followers
        self.model = program.model
        self.vocab_size, self.block_size = program.vocab_size, program.block_size
        self.kinds, self.pool_sizes, self.num_blocks = program.kinds, program.pool_sizes, program.num_blocks
        self.max_rows, self.max_logits = program.max_rows, program.max_logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        if pairs:
            self._followers.send(CopyBlocks(self._followers.begin(), pairs, kind))
        self._program.copy_blocks(pairs, kind)

    def forward(
        self, chunks: Chunks, rows: list[int], features: NDArray[np.float32] | None = None
    ) -> tuple[list[bool], Logits]:
        if features is not None:
            raise ValueError("ranks compute no drafters, which alone take features")
        self._followers.send(Forward(self._followers.begin(), *chunks, rows))
        with self._together():
            return self._program.forward(chunks, rows)

    def logits(self, rows: list[int]) -> Logits:
        self._followers.send(LogitsOf(self._followers.begin(), rows))
        with self._together():
            return self._program.logits(rows)

    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        self._followers.send(HiddenStatesOf(self._followers.begin(), rows))
        with self._together():
            return self._program.hidden_states(rows)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise `RankLostError` at the end of a call, also of one that failed, if what was gathered is of no use."""
        try:
            yield
        except Exception:
            self._followers.check()
            raise
        self._followers.check()

    def features(self, rows: list[int]) -> NDArray[np.float32]:
        raise ValueError("ranks keep no features for drafters")

    def close(self) -> None:
        self._followers.close()
        self._program.close()


def follow(program: Any, receive: Callable[[], Call | None], meeting: Meeting) -> None:
    """Make rank 0's calls until `receive` returns None.

    A call that fails here fails on rank 0 too, which decides what becomes of it; if it failed here alone, the gathers
    no longer fit. Raises `RankLostError` when they do not.
    """
    while (call := receive()) is not None:
        meeting.begin(call.call_id)
        try:
            make(program, call)
        except Exception as error:
            logger.warning("a call failed on this rank", exc_info=error)
        if fault := meeting.fault():
            raise RankLostError(f"the ranks are apart: {fault}")


def make(program: Program, call: Call) -> None:
    """Make one call. Its results are rank 0's."""
    match call:
        case Forward():
            _, *fields, rows = msgspec.structs.astuple(call)
            program.forward(Chunks(*fields), rows)
        case LogitsOf(_, rows):
            program.logits(rows)
        case HiddenStatesOf(_, rows):
            program.hidden_states(rows)
        case CopyBlocks(_, pairs, kind):
            program.copy_blocks(pairs, kind)
