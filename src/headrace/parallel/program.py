"""The program of a model that several ranks compute: `RankedProgram` on rank 0, `follow` on each other one.

Rank 0 schedules, samples and drafts as one process does. It sends the calls of its program to the other ranks, as ints;
each rank makes the call by itself over the heads that it has, and they exchange columns in the gathers. Knows programs
and messages; must not know requests, processes or sockets. Called by `engine.ranks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.backends.step import Chunks
from headrace.protocol.errors import EngineDeadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.backends.base import Program
    from headrace.backends.step import Logits

logger = logging.getLogger("headrace.engine")


class RankLostError(EngineDeadError):
    """The ranks of a model no longer compute together: one of them ended, stands still, or makes other calls."""


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """`Program.forward`: the fields of `Chunks` but for `observed`, then the rows of logits."""

    call_id: int
    starts: list[int]
    token_ids: list[list[int]]
    tables: list[list[int]]
    copies: Sequence[tuple[int, int]]
    more_tables: Sequence[Sequence[list[int]]]
    states_in: Sequence[int]
    states_out: Sequence[tuple[int, int]]
    later: Sequence[int]
    rows: list[int]

    @classmethod
    def of(cls, call_id: int, chunks: Chunks, rows: list[int]) -> Forward:
        return cls(call_id, *chunks[:7], list(chunks.later), rows)

    def chunks(self) -> Chunks:
        _, *fields, _ = msgspec.structs.astuple(self)
        return Chunks(*fields)


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
    """From one stage to the next, in place of the rows of a call that a rank could not compute."""

    call_id: int
    kind: str
    message: str


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """While a model is loaded: one rank's values, sent to rank 0; or from rank 0 the values of all ranks, by stage."""

    values: list[list[float]]


Passed = HiddenRows | Fault
"""A message from stage to stage."""


Call = Forward | LogitsOf | HiddenStatesOf | CopyBlocks


class Gathers(Protocol):
    """One rank's side of the gathers of all ranks: `_native.Ranks`, `parallel.gloo.GlooRanks` or `DeviceRanks`."""

    def begin(self, call_id: int) -> None:
        """Number the following gathers with their call, so that ranks in different calls notice it."""
        ...

    def fault(self) -> str:
        """Return why the gathers cannot go on, or ""."""
        ...

    def break_group(self) -> None:
        """End the gathers on all ranks, also those that wait."""
        ...


class OtherRanks(Protocol):
    """The other ranks, as rank 0 sees them."""

    def begin(self) -> int:
        """Begin the next call on this rank, and return its number."""
        ...

    def send(self, call: Call) -> None:
        """Send a call to all other ranks. Raises `RankLostError`."""
        ...

    def check(self) -> None:
        """Raise `RankLostError` if gathered values are of no use."""
        ...

    def close(self) -> None: ...


class RankedProgram:
    """Rank 0's `program`, each of whose calls is also made on all other ranks."""

    def __init__(self, program: Program, others: OtherRanks) -> None:
        self._program, self._others = program, others
        self.model = program.model
        self.vocab_size, self.block_size = program.vocab_size, program.block_size
        self.kinds, self.pool_sizes, self.num_blocks = program.kinds, program.pool_sizes, program.num_blocks
        self.max_rows, self.max_logits = program.max_rows, program.max_logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        if pairs:
            self._others.send(CopyBlocks(self._others.begin(), pairs, kind))
        self._program.copy_blocks(pairs, kind)

    def forward(
        self, chunks: Chunks, rows: list[int], features: NDArray[np.float32] | None = None
    ) -> tuple[list[bool], Logits]:
        if features is not None:
            raise ValueError("ranks compute no drafters, which alone take features")
        self._others.send(Forward.of(self._others.begin(), chunks, rows))
        with self._together():
            return self._program.forward(chunks, rows)

    def logits(self, rows: list[int]) -> Logits:
        self._others.send(LogitsOf(self._others.begin(), rows))
        with self._together():
            return self._program.logits(rows)

    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        self._others.send(HiddenStatesOf(self._others.begin(), rows))
        with self._together():
            return self._program.hidden_states(rows)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise `RankLostError` at the end of a call, also of one that failed, if gathered values are of no use."""
        try:
            yield
        except Exception:
            self._others.check()
            raise
        self._others.check()

    def features(self, rows: list[int]) -> NDArray[np.float32]:
        raise ValueError("ranks keep no features for drafters")

    def close(self) -> None:
        self._others.close()
        self._program.close()


def follow(program: Any, receive: Callable[[], Call | None], gathers: Gathers) -> None:
    """Make rank 0's calls until `receive` returns None.

    A call that fails here fails on rank 0 too, which decides how to go on; if it failed here alone, this rank's gathers
    no longer fit the other ranks'. Raises `RankLostError` when they do not.
    """
    while (call := receive()) is not None:
        gathers.begin(call.call_id)
        try:
            make(program, call)
        except Exception as error:
            logger.warning("a call failed on this rank", exc_info=error)
        if fault := gathers.fault():
            raise RankLostError(f"the ranks are apart: {fault}")


def make(program: Program, call: Call) -> None:
    """Make one call. Only rank 0 uses its results."""
    match call:
        case Forward():
            program.forward(call.chunks(), call.rows)
        case LogitsOf(_, rows):
            program.logits(rows)
        case HiddenStatesOf(_, rows):
            program.hidden_states(rows)
        case CopyBlocks(_, pairs, kind):
            program.copy_blocks(pairs, kind)
