"""Rows that turn by a position on each of several axes, as those of pictures do (M-RoPE, Wang et al. 2024).

A row whose positions are the same on all axes turns by a row of the rope table. Any other row gets one of its own
behind the table's end, pair by pair out of the rows of its positions: so its angles depend on its positions alone.
Knows tables; must not know what a row is of. Called by the backends' programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import RopeTable

SPARE_ROWS = 8192
"""Rows behind the table of a text model: the most that a step of any backend has."""


def table_of(model: Any) -> RopeTable | None:
    """Return the rope table of a model whose rows have positions on several axes; None for other models."""
    table: RopeTable | None = getattr(model, "rope_table", None)
    return table if table is not None and table.axes is not None else None


def fill(rope_rows: NDArray[np.int32], places: NDArray[np.int64], table: RopeTable) -> None:
    """Write the rows of `table` by which rows at `places` [R, axes] turn, and those rows that are the step's own.
    Raises ValueError for places beyond the table."""
    if table.axes is None:
        raise ValueError("places for a table of one axis")
    of_pairs, spare = table.axes
    mixed = np.flatnonzero((places != places[:, :1]).any(axis=1))
    if (places.size and not 0 <= places.min() <= places.max() < spare) or len(mixed) > len(table.cos) - spare:
        raise ValueError(f"places from {places.min()} to {places.max()} of {len(mixed)} rows, a table of {spare}")
    rope_rows[: len(places)] = places[:, 0]
    rope_rows[mixed] = spare + np.arange(len(mixed))
    pairs = np.arange(len(of_pairs))
    for numbers in (table.cos, table.sin):
        numbers[spare : spare + len(mixed)] = numbers[places[mixed][:, of_pairs], pairs]
