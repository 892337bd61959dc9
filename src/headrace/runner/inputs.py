"""`ForwardBatch`: a ScheduledBatch as tensors, one row for each token. Lives for one step.

Here the ints of the core become indices on the device. Knows block tables and slots; must not know parameters of
requests. Made by `runner.runner`, read by the models and the backend's attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.types import ScheduledBatch


@dataclass(slots=True)
class ForwardBatch:
    """R rows of C chunks.

    token_ids, positions, slot_mapping, seq_index: int64 [R]; seq_index is the row's chunk.
    starts, lens: of the chunks. block_tables: int64 [C, longest], padded with 0.
    notes: what ropes and attention work out once a step, under keys of their own.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_index: Tensor
    starts: list[int]
    lens: list[int]
    block_tables: Tensor
    notes: dict[Any, Any] = field(default_factory=dict)


def verify_chunk(
    batch: ScheduledBatch, chunk_id: int, token_ids: list[int], vocab_size: int, num_slots: int, block_size: int
) -> str:
    """Why chunk `chunk_id` can not be computed, or "" if it can. `token_ids` are its own."""
    start, length, table = batch.starts[chunk_id], batch.lens[chunk_id], batch.block_tables[chunk_id]
    if length < 1 or start < 0:
        return f"positions {start} ... {start + length - 1} are no positions"
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return f"token ids reach from {min(token_ids)} to {max(token_ids)}, the model has 0 to {vocab_size - 1}"
    if len(table) * block_size < start + length:
        return f"{len(table)} blocks of {block_size} do not hold {start + length} positions"
    if not 0 <= min(table) <= max(table) < num_slots // block_size:
        return f"block ids reach from {min(table)} to {max(table)}, the cache has 0 to {num_slots // block_size - 1}"
    return ""


def make_forward_batch(
    batch: ScheduledBatch, chunk_ids: list[int], token_ids: list[list[int]], block_size: int, device: torch.device
) -> ForwardBatch:
    """Tensors of the chunks `chunk_ids` of `batch`; `token_ids` are those of each of them."""
    starts = [batch.starts[i] for i in chunk_ids]
    lens = [batch.lens[i] for i in chunk_ids]
    tables = [batch.block_tables[i] for i in chunk_ids]
    longest = max(map(len, tables))
    block_tables = torch.tensor([t + [0] * (longest - len(t)) for t in tables], dtype=torch.int64)
    seq_index = torch.repeat_interleave(torch.arange(len(chunk_ids)), torch.tensor(lens))
    positions = torch.tensor([p for start, n in zip(starts, lens, strict=True) for p in range(start, start + n)])
    slots = block_tables[seq_index, positions // block_size] * block_size + positions % block_size
    return ForwardBatch(
        token_ids=torch.tensor([t for ids in token_ids for t in ids]).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        seq_index=seq_index.to(device),
        starts=starts,
        lens=lens,
        block_tables=block_tables.to(device),
    )
