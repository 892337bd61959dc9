"""`Chooser`: the native operator `choose` on rows of logits, threads over rows and the GIL released.

Owns the small arrays that the operator reads and writes. Knows rows of numbers; must not know samplers or requests.
Made by the backend's `chooser`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.choosing import Chosen
from headrace.backends.native import record, require_native

MAX_WIDTH = 2**18


class Chooser:
    """For rows of `width` logits, `max_rows` in one native call; `num_threads` 0 is the team's default.

    Raises ValueError for rows wider than `MAX_WIDTH`.
    """

    def __init__(self, width: int, num_threads: int = 0, isa: str = "", max_rows: int = 32) -> None:
        if width > MAX_WIDTH:
            raise ValueError(f"rows of {width} logits: a thread's memory has room for {MAX_WIDTH}")
        self.width, self._num_threads, self._max_rows = width, num_threads, max_rows
        # The operator's fields with a number for each row; "rows" are the addresses of the rows themselves.
        whole, unsigned, double = (np.dtype(kind) for kind in (np.int64, np.uint64, np.float64))
        dtypes = {"rows": unsigned, "greatest": double, "temperature": double, "floor": double, "top_k": whole,
                  "top_p": double, "drawn": whole, "seed": unsigned, "position": unsigned, "count": whole,
                  "total": whole}  # fmt: skip
        self._fields: dict[str, NDArray[Any]] = {name: np.zeros(max_rows, dtype) for name, dtype in dtypes.items()}
        # Pages come into memory as they are written: few, except for rows without top_k.
        self._ids = np.empty((max_rows, width), np.int32)
        self._scaled = np.empty((max_rows, width), np.float64)
        addresses = {name: array.ctypes.data for name, array in self._fields.items()}
        addresses |= {"ids": self._ids.ctypes.data, "scaled": self._scaled.ctypes.data}
        self._tape = require_native().Tape(isa)
        record(self._tape, "choose", dim=0, width=width, **addresses)

    def __call__(
        self,
        rows: list[NDArray[np.float32]],
        top_k: list[int],
        cuts: list[tuple[float, float, float, float]],
        keys: list[tuple[int, int] | None],
    ) -> list[Chosen]:
        """Return token ids, ascending, scaled logits and total of each row.

        A cut is greatest, temperature, floor, top_p; a key is seed and position where the row is drawn from next: see
        csrc/include/kernels.h.
        """
        choices: list[Chosen] = []
        for start in range(0, len(rows), self._max_rows):
            part = slice(start, start + self._max_rows)
            choices += self._choose(rows[part], top_k[part], cuts[part], keys[part])
        return choices

    def _choose(
        self,
        rows: list[NDArray[np.float32]],
        top_k: list[int],
        cuts: list[tuple[float, float, float, float]],
        keys: list[tuple[int, int] | None],
    ) -> list[Chosen]:
        rows = [np.ascontiguousarray(row, np.float32) for row in rows]
        greatest, temperature, floor, top_p = zip(*cuts, strict=True)
        values: dict[str, Sequence[float]] = {
            "greatest": greatest,
            "temperature": temperature,
            "floor": floor,
            "top_p": top_p,
            "rows": [row.ctypes.data for row in rows],
            "top_k": top_k,
            "drawn": [key is not None for key in keys],
            "seed": [key[0] if key else 0 for key in keys],
            "position": [key[1] if key else 0 for key in keys],
        }
        for name, numbers in values.items():
            self._fields[name][: len(rows)] = numbers
        self._tape.run([len(rows), 0, 0], self._num_threads)
        counts, totals = (self._fields[name][: len(rows)].tolist() for name in ("count", "total"))
        return [
            (self._ids[i, :count].astype(np.int64), self._scaled[i, :count].copy(), total)
            for i, (count, total) in enumerate(zip(counts, totals, strict=True))
        ]
