"""The KV cache in the kernels' layout: slots in tiles of 16, keys transposed for sixteen scores at a time.

Owns the memory of all layers. The layout, to the element, is in csrc/include/kernels.h. Knows slots and blocks; must
not know sequences. Made and used by `program`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import LayerShape
from headrace.backends.cpu.memory import aligned
from headrace.backends.states import StateCache

TILE = 16
TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4, "fp8_e4m3": 5, "fp8_e5m2": 6,
              "int8_dot": 7}  # fmt: skip
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8, "int4": np.uint8,
          "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8, "int8_dot": np.uint8}  # fmt: skip
SCALED = ("int8", "int4", "fp8_e4m3", "int8_dot")
"""Types whose codes have 4 bytes of scales for each token and head."""
TYPE_NAMES = {code: name for name, code in TYPE_CODES.items()}

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


class Fours:
    """Values [tiles, 4, 4, kv_heads, row] whose lane 4 a + b is at [:, a, b], indexed by tile and lane, or by tiles."""

    def __init__(self, view: NDArray[Any]) -> None:
        self.view = view

    def __getitem__(self, at: Any) -> NDArray[Any]:
        part: NDArray[Any] = self.view[(at[0], *np.divmod(at[1], 4)) if isinstance(at, tuple) else at]
        return part

    def __setitem__(self, at: Any, numbers: NDArray[Any]) -> None:
        self.view[(at[0], *np.divmod(at[1], 4)) if isinstance(at, tuple) else at] = numbers


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """keys [tiles, kv_heads, rows, 16] and values [tiles, kv_heads, 16, row] of one layer; bfloat16 as uint16. `rows`
    and `row` are the numbers of a key and of a value, or for int4 the bytes that they take (`packed_sizes`). Without
    a `values` array, values are the first numbers of the keys. For int8_dot keys [tiles, kv_heads, rows / 4, 16, 4]
    and values [tiles, kv_heads, 4, row, 4], bytes both.

    For int8, int8_dot and fp8_e4m3 scales float32 [tiles, kv_heads, 16] of each; for int4 uint16 [tiles, kv_heads, 2,
    16] (step and least number as bfloat16), and key_mean float32 [kv_heads, head_dim], which is subtracted from keys.
    """

    dtype: str
    kind: int
    keys: NDArray[Any]
    values: NDArray[Any] | None
    key_scales: NDArray[Any] | None
    value_scales: NDArray[Any] | None
    key_mean: NDArray[np.float32] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the cache that rope_store and attention share."""
        return {
            "kv_type": TYPE_CODES[self.dtype],
            "k": self.keys,
            "v": self.values,
            "k_scale": self.key_scales,
            "v_scale": self.value_scales,
        }

    def by_slot(self) -> list[Any]:
        """Return views [tiles, 16, kv_heads, ...] of everything that belongs to a slot, or `Fours`."""
        last = self.dtype == "int4"
        views: list[Any] = [np.moveaxis(self.keys, 3, 1)]
        if self.dtype == "int8_dot":
            views.append(Fours(np.moveaxis(self.values, (2, 4), (1, 2))))  # type: ignore[arg-type]
        elif self.values is not None:
            views.append(np.moveaxis(self.values, 2, 1))
        scales = [scales for scales in (self.key_scales, self.value_scales) if scales is not None]
        return views + [np.moveaxis(array, 3 if last else 2, 1) for array in scales]


def stored_as(shape: LayerShape, dtype: str) -> str:
    """Return the type of a layer's cache: values that are a part of their keys can not lie four together as well."""
    return "int8" if dtype == "int8_dot" and shape.shares_key else dtype


def packed_sizes(shape: LayerShape, dtype: str) -> tuple[int, int]:
    """Return the elements that a token takes for one head: key, value (0 where the value is a part of the key)."""
    key, value = shape.head_dim, shape.value_size
    if stored_as(shape, dtype) == "int8_dot":
        return -(-key // 4) * 4, -(-value // TILE) * TILE
    if dtype == "int4":
        key, value = (key + 1) // 2, value // 32 * 16 + min(value % 32, 16)
    return key, 0 if shape.shares_key else value


def block_bytes(shapes: Sequence[LayerShape], kind: int, block_size: int, dtype: str) -> int:
    """Return the bytes of a block of a kind over all its layers, scales included."""
    total = 0
    for shape in shapes:
        if shape.kind == kind and shape.states:
            total += 4 * sum(math.prod(size) for size in shape.states)
        elif shape.kind == kind and shape.source is None:
            per_head = sum(packed_sizes(shape, dtype)) * np.dtype(STORED[dtype]).itemsize
            per_head += (4 if shape.shares_key else 8) if dtype in SCALED else 0
            total += block_size * shape.num_kv_heads * per_head
    return total


def numbers(fields: Mapping[str, Any], name: str, slots: NDArray[Any]) -> F64:
    """Return the numbers [slots, kv_heads, D] of "k" (less k_mean) or "v" at `slots` of a cache, which has these fields
    in rope_store and attention."""
    if name == "v" and fields["v"] is None:
        return numbers(fields, "k", slots)[..., : fields["value_dim"]]
    dtype, (tile, lane) = TYPE_NAMES[fields["kv_type"]], np.divmod(slots, TILE)
    if dtype == "int8_dot":
        array, every = fields[name], slice(None)
        raw = array[tile, :, :, lane] ^ 128 if name == "k" else array[tile, every, lane // 4, every, lane % 4]
        scale = np.moveaxis(fields[f"{name}_scale"], 2, 1)[tile, lane][..., None]
        width = fields["head_dim" if name == "k" else "value_dim"]
        codes = raw.view(np.int8).reshape(*scale.shape[:-1], -1)[..., :width]
        y: F64 = codes.astype(np.float64) * scale
        return y
    codes = np.moveaxis(fields[name], 3 if name == "k" else 2, 1)[tile, lane]
    scales = fields[f"{name}_scale"]
    if dtype == "int4":
        at = np.arange(fields["head_dim" if name == "k" else "value_dim"])
        byte, shift = (at // 2, at % 2 * 4) if name == "k" else (at // 32 * 16 + at % 16, at % 32 // 16 * 4)
        step, least = np.moveaxis(widened(np.moveaxis(scales, 3, 1)[tile, lane], "bfloat16"), -1, 0)
        x: F64 = (codes[..., byte] >> shift & 15) * step[..., None] + least[..., None]
        return x
    x = widened(codes, dtype)
    return x if scales is None else x * np.moveaxis(scales, 2, 1)[tile, lane][..., None]


def widened(raw: NDArray[Any], dtype: str) -> F64:
    """Return stored numbers as float64, without their scales; bfloat16 is stored as uint16, fp8 as uint8."""
    if dtype == "bfloat16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "fp8_e5m2":
        raw = (raw.astype(np.uint16) << 8).view(np.float16)
    elif dtype == "fp8_e4m3":
        half = raw.astype(np.uint16)
        raw = ((half & 0x80) << 8 | (half & 0x7F) << 7).view(np.float16)
    return raw.astype(np.float64)


class KVCache:
    """A zeroed cache for each of `shapes` over the blocks of its kind; a shape with a source shares the source's cache.
    Pages come into memory as slots are written."""

    def __init__(self, shapes: Sequence[LayerShape], pool_sizes: Sequence[int], block_size: int, dtype: str) -> None:
        self.pool_sizes, self.block_size = tuple(pool_sizes), block_size
        self.layers: list[Any] = []  # each a LayerCache or a StateCache
        for shape in shapes:
            if shape.states:
                self.layers.append(self._states(shape))
                continue
            self.layers.append(self._layer(shape, dtype) if shape.source is None else self.layers[shape.source])

    def _states(self, shape: LayerShape) -> StateCache:
        sizes = [(self.pool_sizes[shape.kind], *size) for size in shape.states]
        arrays = [aligned(4 * math.prod(size)).view(np.float32).reshape(size) for size in sizes]
        return StateCache(shape.kind, tuple(arrays))

    def _layer(self, shape: LayerShape, dtype: str) -> LayerCache:
        tiles, heads = -(-self.pool_sizes[shape.kind] * self.block_size // TILE), shape.num_kv_heads
        dtype = stored_as(shape, dtype)

        def zeros(*dims: int, item: Any) -> NDArray[Any]:
            array: NDArray[Any] = aligned(int(np.prod(dims)) * np.dtype(item).itemsize).view(item).reshape(dims)
            return array

        rows, row = packed_sizes(shape, dtype)
        keys = zeros(tiles, heads, rows, TILE, item=STORED[dtype])
        values = zeros(tiles, heads, TILE, row, item=STORED[dtype]) if row else None
        if dtype == "int8_dot" and values is not None:
            keys, values = keys.reshape(tiles, heads, -1, TILE, 4), values.reshape(tiles, heads, 4, row, 4)
        scales: list[Any] = [None, None]
        if dtype in SCALED:
            scales = [
                zeros(tiles, heads, TILE, item=np.float32) if part is not None else None for part in (keys, values)
            ]
        mean = None
        if dtype == "int4":
            scales = [None if part is None else part.view(np.uint16).reshape(tiles, heads, 2, TILE) for part in scales]
            # A mean that is subtracted from keys must not be missing in values that are part of them.
            mean = None if values is None else np.zeros((heads, shape.head_dim), np.float32)
        return LayerCache(dtype, shape.kind, keys, values, scales[0], scales[1], mean)

    def _of_kind(self, kind: int | None) -> list[Any]:
        """Return all arrays of the slots of a kind, or of every kind."""
        layers = [layer for layer in self.layers if isinstance(layer, LayerCache) and kind in (layer.kind, None)]
        unique = {id(layer): layer for layer in layers}
        return [array for layer in unique.values() for array in layer.by_slot()]

    def _states_of(self, kind: int | None) -> list[F32]:
        layers = [layer for layer in self.layers if isinstance(layer, StateCache) and kind == layer.kind]
        return [array for layer in layers for array in layer.arrays]

    def _at(self, block: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return tile and lane of each slot of a block."""
        tile, lane = np.divmod(block * self.block_size + np.arange(self.block_size), TILE)
        return tile, lane

    def read_block(self, block: int, kind: int | None = None) -> bytes:
        """Return the bytes of a block in one kind or in every block kind, without `key_mean`, which is the model's; or
        the bytes of a slot of a state kind."""
        if states := self._states_of(kind):
            return b"".join(array[block].tobytes() for array in states)
        at = self._at(block)
        return b"".join(array[at].tobytes() for array in self._of_kind(kind))

    def write_block(self, block: int, data: bytes, kind: int | None = None) -> None:
        """Set a block to bytes that `read_block` returned."""
        states = self._states_of(kind)
        at: Any = block if states else self._at(block)
        for array in states or self._of_kind(kind):
            part = array[at]
            array[at] = np.frombuffer(data[: part.nbytes], part.dtype).reshape(part.shape)
            data = data[part.nbytes :]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        """Copy whole blocks (source, target) of a kind, one pair after the other."""
        for array in self._states_of(kind):
            for source, target in pairs:
                array[target] = array[source]
        size, arrays = self.block_size, self._of_kind(kind)
        for source, target in pairs:
            if size % TILE == 0:
                tiles = size // TILE
                for array in arrays:
                    array[target * tiles : (target + 1) * tiles] = array[source * tiles : (source + 1) * tiles]
                continue
            from_at, to_at = self._at(source), self._at(target)
            for array in arrays:
                array[to_at] = array[from_at]
