"""The KV cache in the kernels' layout: slots in tiles of 16, keys turned so that sixteen scores are made at once.

Owns the memory of all layers. The layout, to the element, is in csrc/include/kernels.h. Knows slots and blocks; must
not know sequences. Made and used by `program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import ITEM_BYTES, KVShape
from headrace.backends.cpu.memory import aligned

TILE = 16
TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3}
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """keys [tiles, kv_heads, head_dim, 16] and values [tiles, kv_heads, 16, head_dim] of one layer; bfloat16 as uint16.

    For int8, scales float32 [tiles, kv_heads, 16] of each.
    """

    dtype: str
    keys: NDArray[Any]
    values: NDArray[Any]
    key_scales: NDArray[np.float32] | None
    value_scales: NDArray[np.float32] | None

    def fields(self) -> dict[str, Any]:
        """The cache's fields of rope_store and attention."""
        return {
            "kv_type": TYPE_CODES[self.dtype],
            "k": self.keys,
            "v": self.values,
            "k_scale": self.key_scales,
            "v_scale": self.value_scales,
        }

    def arrays(self) -> list[NDArray[Any]]:
        found = (self.keys, self.values, self.key_scales, self.value_scales)
        return [array for array in found if array is not None]


def block_bytes(shape: KVShape, block_size: int, dtype: str) -> int:
    """Bytes of a block over all layers, scales included."""
    per_head = shape.head_dim * ITEM_BYTES[dtype] + (4 if dtype == "int8" else 0)
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * per_head


class KVCache:
    """Zeroed layers [num_layers] over `num_blocks` blocks. Memory is taken from the system as slots are written."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, dtype: str) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        tiles = -(-num_blocks * block_size // TILE)
        heads, size = shape.num_kv_heads, shape.head_dim

        def zeros(*dims: int, item: Any) -> NDArray[Any]:
            made: NDArray[Any] = aligned(int(np.prod(dims)) * np.dtype(item).itemsize).view(item).reshape(dims)
            return made

        self.layers = []
        for _ in range(shape.num_layers):
            keys = zeros(tiles, heads, size, TILE, item=STORED[dtype])
            values = zeros(tiles, heads, TILE, size, item=STORED[dtype])
            scales = [zeros(tiles, heads, TILE, item=np.float32) if dtype == "int8" else None for _ in range(2)]
            self.layers.append(LayerCache(dtype, keys, values, scales[0], scales[1]))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), one pair after the other."""
        size = self.block_size
        for source, target in pairs:
            if size % TILE == 0:
                tiles = size // TILE
                for layer in self.layers:
                    for array in layer.arrays():
                        array[target * tiles : (target + 1) * tiles] = array[source * tiles : (source + 1) * tiles]
                continue
            slots = np.arange(size)
            (from_tile, from_lane), (to_tile, to_lane) = (
                divmod(block * size + slots, TILE) for block in (source, target)
            )
            for layer in self.layers:
                layer.keys[to_tile, :, :, to_lane] = layer.keys[from_tile, :, :, from_lane]
                for array in layer.arrays()[1:]:
                    array[to_tile, :, to_lane] = array[from_tile, :, from_lane]
