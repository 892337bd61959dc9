"""`Gather`: each rank's columns of some rows, moved to all ranks and put together. A gather moves numbers and computes
none (ADR 0037).

Knows tensors and layouts; must not know processes or the libraries that move. Made by `tape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.backends.shares import Layout

ALIGN = 256
"""Bytes at multiples of which the parts of the ranks begin."""


class Exchange(Protocol):
    """Moves bytes between the devices of all ranks: `parallel.devices.DeviceRanks`."""

    def gather(self, parts: Tensor, part: Tensor) -> None:
        """Fill `parts` [W, n] with the `part` [n] of each rank, uint8, in the order of ranks."""
        ...


def most_columns(layout: Layout) -> int:
    """Return the largest number of columns of a rank: all ranks send as many."""
    return max(layout.num(rank) for rank in range(num_ranks(layout)))


def num_ranks(layout: Layout) -> int:
    return len(layout.parts[0].bounds)


def num_bytes(layout: Layout, num_rows: int, item_bytes: int) -> int:
    """Return the bytes of memory that a gather of so many rows takes in addition to its values."""
    size = -(-num_rows * most_columns(layout) * item_bytes // ALIGN) * ALIGN
    return size * (1 + num_ranks(layout))


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """One gather, ready to run as a `Launch` is: this rank's columns x [R, own] to whole rows out [R, width].

    memory: at least `num_bytes`, uint8; which gathers use one after the other.
    """

    exchange: Exchange
    layout: Layout
    x: Tensor
    out: Tensor
    memory: Tensor

    def run_twin(self) -> None:
        world, (num_rows, num_own) = num_ranks(self.layout), self.x.shape
        shape = num_rows, most_columns(self.layout)
        used = num_bytes(self.layout, num_rows, self.x.element_size()) // (1 + world)
        part, parts = self.memory[:used], self.memory[used : used * (1 + world)].view(world, used)
        size = shape[0] * shape[1] * self.x.element_size()
        part[:size].view(self.x.dtype).view(shape)[:, :num_own].copy_(self.x)
        self.exchange.gather(parts, part)
        for rank in range(world):
            rows = parts[rank, :size].view(self.x.dtype).view(shape)
            for column, place, num in self.layout.spans(rank):
                self.out[:, place : place + num].copy_(rows[:, column : column + num])

    def run_gpu(self) -> None:
        self.run_twin()


def grown(memory: Tensor, needed: int) -> Tensor:
    """Return memory of at least `needed` bytes: `memory` if it is large enough."""
    return memory if memory.numel() >= needed else torch.zeros(needed, dtype=torch.uint8, device=memory.device)
