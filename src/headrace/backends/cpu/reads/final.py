"""`FinalTape`: select and final norm of the hidden states that the last step left, on a tape of its own.

On the step's tape they would run in each step, and few callers need them. Knows values and arrays; must not know
requests. Made by `program`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import LOGITS, ROWS, Value

F32 = NDArray[np.float32]


class FinalTape:
    """For the rows `places` of `states`, where `hidden` lies. most, isa: as `Tape` takes them."""

    def __init__(
        self,
        ops: CpuOps | RankOps,
        model: Any,
        hidden: Value,
        states: F32,
        places: NDArray[np.int32],
        most: dict[int, int],
        isa: str,
    ) -> None:
        ops.begin()
        graph = ops.graph
        source = graph.outside(hidden.width, ROWS, hidden.buffer.row_bytes)
        final = ops.whole(model.final(source, places))
        self._out = aligned(4 * most[LOGITS] * final.ld).view(np.float32).reshape(most[LOGITS], final.ld)
        self._width = final.width
        graph.keep_outside(source.buffer, states)
        graph.keep_outside(final.buffer, self._out)
        self._tape = Tape(graph, most, isa)
        ops.begin()

    def run(self, num_rows: int, num_threads: int) -> F32:
        """Return the first `num_rows` of the rows, valid until the next call."""
        self._tape.run([0, 0, num_rows], num_threads)
        return self._out[:num_rows, : self._width]

    def close(self) -> None:
        self._tape.close()
