"""`ReadRows`: the rows of a call that are read after it; the last layer is computed for these alone.

Knows chunks and numbers of rows; must not know graphs, models or devices. Called by programs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.step import Chunks


class ReadRows:
    """The rows of each chunk from the first one that is read to the chunk's end, so that they follow each other.

    In the order of the call they have the places 0, 1, ...: of chunk c the rows firsts[c] ... ends[c] - 1 have the
    places begins[c] ... begins[c + 1] - 1.
    """

    def __init__(self, chunks: Chunks, rows: Sequence[int] = (), *, with_observed: bool = True) -> None:
        """The rows that the chunks announce, and `rows`. with_observed: also those whose features are read.

        Raises ValueError for a row beyond the chunks.
        """
        rows = [*rows, *chunks.later, *(chunks.observed if with_observed else ())]
        self.ends = list(itertools.accumulate(map(len, chunks.token_ids)))
        self.num_rows = self.ends[-1] if self.ends else 0
        self.check(rows)
        self.is_whole = len(rows) >= self.num_rows == len(set(rows))
        if self.is_whole:
            self.firsts, self.begins = [0, *self.ends[:-1]], [0, *self.ends]
            return
        self.firsts = list(self.ends)
        for row in rows:
            chunk = bisect_right(self.ends, row)
            self.firsts[chunk] = min(self.firsts[chunk], row)
        counts = (end - first for first, end in zip(self.firsts, self.ends, strict=True))
        self.begins = [0, *itertools.accumulate(counts)]
        self.is_whole = self.num_read == self.num_rows

    @property
    def num_read(self) -> int:
        return self.begins[-1]

    @property
    def num_unread(self) -> int:
        return self.num_rows - self.begins[-1]

    def check(self, rows: Sequence[int]) -> None:
        """Raise ValueError for a row that is none of the call's."""
        if rows and not 0 <= min(rows) <= max(rows) < self.num_rows:
            raise ValueError(f"rows {min(rows)} to {max(rows)} of a call with {self.num_rows} rows")

    def rows(self) -> NDArray[np.int32]:
        """Return the rows that are read, ascending."""
        return _ranges(self.firsts, self.ends)

    def unread(self) -> NDArray[np.int32]:
        """Return the other rows, ascending."""
        return _ranges([0, *self.ends[:-1]], self.firsts)

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return the places of some rows. Raises ValueError for a row that is not read."""
        self.check(rows)
        if self.is_whole:
            return list(rows)
        places = []
        for row in rows:
            chunk = bisect_right(self.ends, row)
            if row < self.firsts[chunk]:
                raise ValueError(f"row {row} was not announced by the call")
            places.append(self.begins[chunk] + row - self.firsts[chunk])
        return places

    def all_of_chunks(self, read: NDArray[Any], unread: NDArray[Any]) -> list[bool]:
        """Return for each chunk whether all numbers of its rows are true: `read` has those of the rows that are read,
        by place, `unread` those of the others, ascending."""
        num = len(self.ends)
        if read.all() and unread.all():
            return [True] * num
        others = [0, *(end - stop for end, stop in zip(self.ends, self.begins[1:], strict=True))]
        return [
            bool(read[self.begins[c] : self.begins[c + 1]].all() and unread[others[c] : others[c + 1]].all())
            for c in range(num)
        ]


def _ranges(firsts: Sequence[int], ends: Sequence[int]) -> NDArray[np.int32]:
    parts = [np.arange(first, end, dtype=np.int32) for first, end in zip(firsts, ends, strict=True)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
