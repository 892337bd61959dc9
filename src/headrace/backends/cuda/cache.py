"""The KV cache on a GPU: blocks of [kv_heads, block_size, head_dim], so that a head's positions lie side by side; and
states in slots.

Owns the memory of all layers. Knows blocks and slots; must not know sequences. Made by `program`; written by the kernel
`rope_store`, read by `attention`; states are read and written by `conv` and `recur`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.backends.base import LayerShape
from headrace.backends.states import StateCache
from headrace.backends.torch_ref.tensors import zeros
from headrace.protocol.errors import CheckpointError

STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SCALED = ("int8", "fp8_e4m3")
"""Types whose codes have a float32 scale for each token and head: a number is its code times the scale."""

MOST_KEY, MOST_VALUE = 576, 512
"""Numbers of a key and of a value that the kernels take: their tiles must fit in registers and shared memory."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """keys [num_blocks, kv_heads, block_size, head_dim] and values [..., value_dim] of one layer of block kind `kind`,
    of the dtype in `STORED`; their scales float32 [num_blocks, kv_heads, block_size], None for types that have none.
    All are contiguous, but values of a cache that `shares_key`: they are the keys' first numbers, with their scales."""

    dtype: str
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    kind: int = 0
    shares_key: bool = False

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def parts(self) -> list[Tensor]:
        """Return the arrays, with blocks on the first axis."""
        stored = [self.keys, self.key_scales]
        if not self.shares_key:
            stored = [self.keys, self.values, self.key_scales, self.value_scales]
        return [part for part in stored if part is not None]


class KVCache:
    """A zeroed cache for each of `shapes` over the blocks of its kind; a layer with a source has the source's.

    Raises `CheckpointError` for shapes that the kernels do not have.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        pool_sizes: Sequence[int],
        block_size: int,
        dtype: str,
        device: torch.device,
    ) -> None:
        self.pool_sizes, self.block_size, self.device = tuple(pool_sizes), block_size, device
        self.layers: list[Any] = []  # each a LayerCache or a StateCache
        for shape in shapes:
            if shape.states:
                slots = pool_sizes[shape.kind]
                arrays = [zeros((slots, *size), torch.float32, device) for size in shape.states]
                self.layers.append(StateCache(shape.kind, tuple(arrays)))
                continue
            if shape.source is not None:
                self.layers.append(self.layers[shape.source])
                continue
            if shape.head_dim > MOST_KEY or shape.value_size > MOST_VALUE:
                raise CheckpointError(
                    f"backend cuda has no kernels for keys of {shape.head_dim} numbers with values of "
                    f"{shape.value_size}, {MOST_KEY} and {MOST_VALUE} at most; use cpu or torch_ref"
                )
            sizes = pool_sizes[shape.kind], shape.num_kv_heads, block_size
            keys = _codes(sizes, shape.head_dim, dtype, device)
            values = keys[..., : shape.value_size]
            if not shape.shares_key:
                values = _codes(sizes, shape.value_size, dtype, device)
            layer = LayerCache(dtype, keys, values, kind=shape.kind, shares_key=shape.shares_key)
            if dtype in SCALED:
                scales = zeros((1 if shape.shares_key else 2, *sizes), torch.float32, device)
                layer = replace(layer, key_scales=scales[0], value_scales=scales[-1])
            self.layers.append(layer)

    def _parts(self, kind: int | None) -> list[Tensor]:
        """Return the arrays of a kind with its blocks or slots on the first axis, or of every kind that has blocks."""
        layers = {id(layer): layer for layer in self.layers if kind in (layer.kind, None)}
        parts: list[Tensor] = []
        for layer in layers.values():
            if isinstance(layer, LayerCache):
                parts += layer.parts()
            elif kind is not None:
                parts += layer.arrays
        return parts

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        """Copy whole blocks (source, target) of a kind, one pair after the other."""
        parts = self._parts(kind)
        for source, target in pairs:
            for part in parts:
                part[target] = part[source]

    def read_block(self, block: int, kind: int | None = None) -> bytes:
        """Return the bytes of a block in one kind or in every kind that has blocks, or of a slot of states."""
        blocks = [part[block].contiguous().view(torch.uint8).cpu().numpy() for part in self._parts(kind)]
        return b"".join(block.tobytes() for block in blocks)

    def write_block(self, block: int, data: bytes, kind: int | None = None) -> None:
        """Set a block to the result of `read_block`."""
        for part in self._parts(kind):
            to = part[block]
            raw, data = data[: to.nbytes], data[to.nbytes :]
            to.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(to.dtype).view(to.shape))

    def close(self) -> None:
        """Free the memory."""
        self.layers = []


def block_bytes(shapes: Sequence[LayerShape], kind: int, block_size: int, dtype: str) -> int:
    """Return the bytes of a block of a kind over all its layers, scales included; of a kind of states those of a
    slot."""
    total = 0
    for shape in shapes:
        if shape.kind == kind and shape.states:
            total += 4 * sum(math.prod(size) for size in shape.states)
        elif shape.kind == kind and shape.source is None:
            sizes = [shape.head_dim] if shape.shares_key else [shape.head_dim, shape.value_size]
            per_head = sum(size * STORED[dtype].itemsize + (4 if dtype in SCALED else 0) for size in sizes)
            total += block_size * shape.num_kv_heads * per_head
    return total


def _codes(sizes: tuple[int, ...], width: int, dtype: str, device: torch.device) -> Tensor:
    # A view, because not each device fills each type; of a layer that another rank has, an empty one.
    stored = STORED[dtype]
    return zeros((*sizes, max(1, width) * stored.itemsize), torch.uint8, device).view(stored)[..., :width]
