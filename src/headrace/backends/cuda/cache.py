"""The KV cache on a GPU: blocks of [kv_heads, block_size, head_dim], so that a head's positions lie side by side.

Owns the memory of all layers. Knows blocks and slots; must not know sequences. Made by `program`; written by the kernel
`rope_store`, read by `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.backends.base import KVShape
from headrace.backends.torch_ref.tensors import zeros

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


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """keys and values [num_blocks, kv_heads, block_size, head_dim] of one layer, of the dtype in `STORED`; their scales
    float32 [num_blocks, kv_heads, block_size], None for types that have none. All are contiguous."""

    dtype: str
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]


class KVCache:
    """All layers' caches, zeroed: `data` [layers, 2, num_blocks, kv_heads, block_size, head_dim], with `scales`
    [layers, 2, num_blocks, kv_heads, block_size] or None; the 2 are keys and values."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, dtype: str, device: torch.device) -> None:
        sizes = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, block_size)
        stored = STORED[dtype]
        codes = zeros((*sizes, shape.head_dim * stored.itemsize), torch.uint8, device)
        self.dtype = dtype
        self.data = codes.view(stored)
        self.scales = zeros(sizes, torch.float32, device) if dtype in SCALED else None

    def layer(self, index: int) -> LayerCache:
        keys, values = self.data[index]
        if self.scales is None:
            return LayerCache(self.dtype, keys, values)
        return LayerCache(self.dtype, keys, values, *self.scales[index])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), one pair after the other."""
        for source, target in pairs:
            for part in (self.data, self.scales):
                if part is not None:
                    part[:, :, target] = part[:, :, source]

    def _parts(self, block: int) -> list[Tensor]:
        return [part[:, :, block] for part in (self.data, self.scales) if part is not None]

    def read_block(self, block: int) -> bytes:
        """Return all that a block holds."""
        return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in self._parts(block))

    def write_block(self, block: int, data: bytes) -> None:
        """Set a block to what `read_block` returned."""
        for part in self._parts(block):
            raw, data = data[: part.nbytes], data[part.nbytes :]
            part.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(part.dtype).view(part.shape))

    def close(self) -> None:
        """Free the memory."""
        self.data, self.scales = self.data.new_empty(0), None


def block_bytes(shape: KVShape, block_size: int, dtype: str) -> int:
    """Return the bytes of a block over all layers, scales included."""
    per_head = shape.head_dim * STORED[dtype].itemsize + (4 if dtype in SCALED else 0)
    return shape.num_layers * 2 * block_size * shape.num_kv_heads * per_head
