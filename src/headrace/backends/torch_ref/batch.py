"""`ForwardBatch`: the chunks of a step as tensors, with one row for each token.

Here the ints of the core become indices on the device. Knows block tables and slots; must not know operators, models or
requests. Called by `program`, read by the operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.backends.step import Chunks, tables_by_kind


@dataclass(slots=True)
class ForwardBatch:
    """R rows of C chunks.

    token_ids, positions: int64 [R]. slot_mapping: int64 [R] of each block kind.
    starts, lens: of the chunks. block_tables: int64 [C, longest] of each block kind, padded with 0.
    copies: rows and slots, int64 [2, C]: further slots of some rows.
    states_in: the slot of each chunk's state before its first row, or -1. states_out: slots by row.
    features: [R, F], for models that look at them.
    rope_rows: rows of the rope table; None: `positions`.
    places: int64 [R, axes], the positions by which rows turn, of a table with axes; None: `positions`.
    seen: the last position that a row sees, by row; None: its own.
    read: rows whose logits or hidden states are read; None: all may be.
    notes: results that ropes and attention compute once a step, each under its own key.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Sequence[Tensor]
    starts: list[int]
    lens: list[int]
    block_tables: Sequence[Tensor]
    copies: Tensor | None = None
    states_in: Sequence[int] = ()
    states_out: Mapping[int, int] = field(default_factory=dict)
    features: Tensor | None = None
    rope_rows: Tensor | None = None
    places: Tensor | None = None
    seen: Sequence[int] | None = None
    read: frozenset[int] | None = None
    notes: dict[Any, Any] = field(default_factory=dict)


def make_forward_batch(chunks: Chunks, block_size: int, device: torch.device, num_kinds: int = 1) -> ForwardBatch:
    """Return the rows of `chunks`, on `device`."""
    lens = [len(ids) for ids in chunks.token_ids]
    chunk_ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    pairs = zip(chunks.starts, lens, strict=True)
    positions = torch.tensor([p for start, n in pairs for p in range(start, start + n)])
    slots, block_tables = [], []
    for tables in tables_by_kind(chunks, num_kinds):
        longest = max(map(len, tables))
        padded = torch.tensor([t + [0] * (longest - len(t)) for t in tables], dtype=torch.int64)
        of_rows = padded[chunk_ids, positions // block_size] * block_size + positions % block_size
        block_tables.append(padded.to(device))
        slots.append(of_rows.to(device))
    seen: list[int] = positions.tolist() if chunks.wholes else []
    for first, stop in chunks.wholes:
        seen[first:stop] = [seen[stop - 1]] * (stop - first)
    return ForwardBatch(
        token_ids=torch.tensor([t for ids in chunks.token_ids for t in ids]).to(device),
        positions=positions.to(device),
        slot_mapping=slots,
        starts=chunks.starts,
        lens=lens,
        block_tables=block_tables,
        copies=torch.tensor(list(chunks.copies)).T.to(device) if chunks.copies else None,
        states_in=chunks.states_in,
        states_out=dict(chunks.states_out),
        places=None if chunks.places is None else torch.as_tensor(chunks.places, dtype=torch.int64, device=device),
        seen=seen or None,
    )
