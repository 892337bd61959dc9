"""A step's rows with adapters, by slot and in tiles, as csrc/generic/adapters.cpp reads them.

Knows rows and slots; must not know adapters. Called by `backends.step` and by torch_ref.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TILE_ROWS = 4
"""Rows of one adapter that are multiplied together."""


def rows_of_slots(slots: Sequence[int], begins: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows of each slot, slots ascending: chunk c has rows begins[c] ... begins[c + 1] - 1 and slots[c], -1
    for none."""
    by_slot: dict[int, list[int]] = {}
    for chunk, slot in enumerate(slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).extend(range(begins[chunk], begins[chunk + 1]))
    return dict(sorted(by_slot.items()))


def fill_tiles(slots: Sequence[int], begins: Sequence[int], tiles: NDArray[np.int32], rows: NDArray[np.int32]) -> None:
    """Write the rows of chunks, as in `rows_of_slots`, in tiles of one slot. tiles: their number, then for each its
    first place in `rows`, its number of rows and its slot."""
    entries: list[int] = []
    place = 0
    for slot, of_slot in rows_of_slots(slots, begins).items():
        rows[place : place + len(of_slot)] = of_slot
        for first in range(0, len(of_slot), TILE_ROWS):
            entries += (place + first, min(TILE_ROWS, len(of_slot) - first), slot)
        place += len(of_slot)
    tiles[1 : 1 + len(entries)] = entries
    tiles[0] = len(entries) // 3
