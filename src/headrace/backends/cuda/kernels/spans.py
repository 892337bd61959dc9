"""Work lists of attention: a step's rows in tiles, and their keys in spans counted from position 0 of the sequence.

A span is summed on its own, in tiles of keys, and the spans of a row are merged in ascending order (FlashDecoding, Dao
et al. 2023). Spans and key tiles lie at fixed positions, so how rows form tiles and programs share spans changes no
bit. Plain numpy: the list is made on the host and copied to the device before each step. Called by `program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPAN = 512
"""Positions summed on their own: one constant for all batches, or bits would depend on the batch."""

TILE = 64
"""Keys of one product; a span is a whole number of tiles."""

ITEM = 8
"""Ints of a work item: first row, number of rows, position of the first row, place of the sequence's first block in the
step's list of blocks, first span, end of the spans, place of the tile's first partial sum or -1, end of the chunk."""

LARGE = 256
"""Heads with more numbers have smaller tiles of keys, and pieces of their own."""

PIECE = 16
"""Large heads that share a key and are computed by one program."""

SPLIT_ROWS = 16
"""Chunks up to this length take small tiles whose spans may be shared among programs."""

MOST_PARTIALS = 4096
"""Partial sums of a row that the scratch holds at most; rows that find no place are summed by one program."""


def num_partials(max_rows: int, max_len: int) -> int:
    """Return how many partial sums of rows the scratch holds for steps of `max_rows` rows up to position `max_len`."""
    return min(max_rows * -(-max_len // SPAN), MOST_PARTIALS)


def max_items(max_rows: int, max_len: int) -> int:
    """Return the most rows of a work list: its head, a tile for each row, and each partial sum."""
    return 1 + max_rows + num_partials(max_rows, max_len)


def work_list(
    starts: Sequence[int],
    lens: Sequence[int],
    table_begin: Sequence[int],
    few: int,
    many: int,
    partials: int,
    sees_all: bool = False,
) -> NDArray[np.int32]:
    """Return the items [1 + n, ITEM] of a step's chunks: chunk c has lens[c] rows from position starts[c] on.

    Row 0 holds the numbers of small and of large tiles' items, which follow in this order, those with most keys first.

    Args:
        table_begin: place of each chunk's first block.
        few, many: query rows of a small and of a large tile.
        partials: partial sums that the scratch holds. A small tile takes one for each row and span; the longest come
            first, and one that finds no place has a single item.
        sees_all: rows have the spans of their whole chunk, later positions too.
    """
    start, length = np.asarray(starts, np.int64), np.asarray(lens, np.int64)
    first_row = np.cumsum(length) - length
    rows = np.where(length <= SPLIT_ROWS, few, many)
    num_tiles = -(-length // rows)
    chunk = np.repeat(np.arange(len(length)), num_tiles)
    done = (np.arange(len(chunk)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * rows[chunk]
    num_rows = np.minimum(rows[chunk], length[chunk] - done)
    position = start[chunk] + done
    last = (start + length)[chunk]
    end = ((last if sees_all else position + num_rows) - 1) // SPAN + 1
    tiles = np.zeros((len(chunk), ITEM), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2] = first_row[chunk] + done, num_rows, position
    tiles[:, 3] = np.asarray(table_begin, np.int64)[chunk]
    tiles[:, 5], tiles[:, 6], tiles[:, 7] = end, -1, last

    small = length[chunk] <= SPLIT_ROWS
    order = np.argsort(-(position + num_rows), kind="stable")
    needed = np.where(small & (end > 1), end * num_rows, 0)[order]
    place = np.cumsum(needed) - needed
    tiles, small = tiles[order], small[order]
    split = (needed > 0) & (place + needed <= partials)
    tiles[split, 6] = place[split]

    parts = np.where(split, end[order], 1)
    items = np.repeat(tiles, parts, axis=0)
    part = np.arange(len(items)) - np.repeat(np.cumsum(parts) - parts, parts)
    shared = items[:, 6] >= 0
    items[shared, 4] += part[shared].astype(np.int32)
    items[shared, 5] = items[shared, 4] + 1
    small = np.repeat(small, parts)
    head = np.zeros((1, ITEM), np.int32)
    head[0, :2] = small.sum(), (~small).sum()
    return np.concatenate([head, items[small], items[~small]])


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Partial sums of rows in device memory, used by one attention after the other.

    sums [partials, heads, value_dim] float32: weighted values. totals [partials, heads, 2] float32: largest score and
    sum of weights. arrived [partials, kv_heads * pieces] int32: the spans of a tile done so far, at its first partial
    sum; 0 between launches.
    """

    sums: Tensor
    totals: Tensor
    arrived: Tensor


def make_scratch(
    partials: int, heads: int, kv_heads: int, head_dim: int, device: str | torch.device, value_dim: int = 0
) -> Scratch:
    """Allocate the scratch. value_dim 0: that of the keys."""
    value_dim = value_dim or head_dim
    units = kv_heads * num_pieces(heads, kv_heads, max(head_dim, value_dim))
    return Scratch(
        torch.zeros(partials, heads, value_dim, device=device),
        torch.zeros(partials, heads, 2, device=device),
        torch.zeros(partials, units, dtype=torch.int32, device=device),
    )


def group_rows(heads: int, kv_heads: int, head_dim: int = 0) -> int:
    """Return the rows of a product that one query row takes: its heads that share a key head, padded; of heads of more
    than LARGE numbers a piece of them. head_dim: the larger one of keys and values."""
    rows = 1 << (heads // kv_heads - 1).bit_length()
    return min(rows, PIECE) if head_dim > LARGE else rows


def num_pieces(heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the pieces into which the heads that share a key head are cut."""
    return -(-(heads // kv_heads) // group_rows(heads, kv_heads, head_dim))


def tile_keys(head_dim: int, wide: bool) -> int:
    """Return the keys of one product: one number for all steps, or bits would depend on the step."""
    if head_dim <= LARGE:
        return TILE
    return 16 if wide else 32
