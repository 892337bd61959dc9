"""`Chooser`: the native operator `choose` on rows of logits, threads over rows and the GIL released.

Owns the small arrays that the operator reads and writes. Knows rows of numbers; must not know samplers or requests.
Called by `runner.choosing`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.native import record, require_native

MAX_WIDTH = 2**18

Chosen = tuple[NDArray[np.int64], NDArray[np.float64], int]


class Chooser:
    """For rows of `width` logits, `max_rows` in one native call; `num_threads` 0 is the team's default.

    Raises ValueError for rows wider than `MAX_WIDTH`.
    """

    def __init__(self, width: int, num_threads: int = 0, isa: str = "", max_rows: int = 32) -> None:
        if width > MAX_WIDTH:
            raise ValueError(f"rows of {width} logits: a thread's memory has room for {MAX_WIDTH}")
        self.width, self._num_threads, self._max_rows = width, num_threads, max_rows
        self._anchor = np.zeros(1, np.float32)
        self._begin, self._top_k, self._count, self._drawn, self._total = np.zeros((5, max_rows), np.int64)
        self._seed, self._position = np.zeros((2, max_rows), np.uint64)
        self._cuts = np.zeros((4, max_rows))
        # Pages come into being as they are written: few, but for rows without top_k.
        self._ids = np.empty((max_rows, width), np.int32)
        self._scaled = np.empty((max_rows, width), np.float64)
        greatest, temperature, floor, top_p = self._cuts
        arrays: dict[str, NDArray[Any]] = {
            "x": self._anchor, "begin": self._begin, "greatest": greatest, "temperature": temperature, "floor": floor,
            "top_k": self._top_k, "top_p": top_p, "ids": self._ids, "scaled": self._scaled, "count": self._count,
            "drawn": self._drawn, "seed": self._seed, "position": self._position, "total": self._total,
        }  # fmt: skip
        self._tape = require_native().Tape(isa)
        record(self._tape, "choose", dim=0, width=width, **{name: a.ctypes.data for name, a in arrays.items()})

    def __call__(
        self,
        rows: list[NDArray[np.float32]],
        top_k: list[int],
        cuts: list[tuple[float, float, float, float]],
        keys: list[tuple[int, int] | None],
    ) -> list[Chosen]:
        """Token ids, ascending, scaled logits and total of each row. A cut is greatest, temperature, floor, top_p; a
        key is seed and position where the row is drawn from next: see csrc/include/kernels.h."""
        found: list[Chosen] = []
        for start in range(0, len(rows), self._max_rows):
            part = [np.ascontiguousarray(row, np.float32) for row in rows[start : start + self._max_rows]]
            num = len(part)
            # Offsets in floats from one address: rows lie in the step's logits, or in somebody's copies.
            self._begin[:num] = [(row.ctypes.data - self._anchor.ctypes.data) // 4 for row in part]
            self._top_k[:num] = top_k[start : start + num]
            self._cuts[:, :num] = np.transpose(cuts[start : start + num])
            part_keys = keys[start : start + num]
            self._drawn[:num] = [key is not None for key in part_keys]
            self._seed[:num], self._position[:num] = np.transpose([key or (0, 0) for key in part_keys])
            self._tape.run([num, 0, 0], self._num_threads)
            for at, (count, total) in enumerate(
                zip(self._count[:num].tolist(), self._total[:num].tolist(), strict=True)
            ):
                found.append((self._ids[at, :count].astype(np.int64), self._scaled[at, :count].copy(), total))
        return found
