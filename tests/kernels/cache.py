"""A native KV cache in numpy: the layout of csrc/include/kernels.h, written here once more and independently."""

from __future__ import annotations

import numpy as np
from tests.kernels.calls import Array, Floats, Values

from headrace import _native

KINDS = ("f32", "f16", "bf16", "int8")
TYPES: list[type] = [np.float32, np.uint16, np.uint16, np.int8]
ISAS: list[str] = _native.isas()


def to_bf16(x: Floats) -> Array:
    """Rounded to nearest even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16 | 0x40).astype(np.uint16), rounded)


def encoded(x: Floats, kind: str) -> tuple[Array, Floats]:
    """x [..., head_dim] -> what the cache stores of it, and scales [...] (ones unless int8)."""
    ones = np.ones(x.shape[:-1], np.float32)
    if kind == "f32":
        return x, ones
    with np.errstate(all="ignore"):
        if kind == "f16":
            return x.astype(np.float16).view(np.uint16), ones
        if kind == "bf16":
            return to_bf16(x), ones
        amax = np.abs(x).max(-1)
        inverse = np.where(amax == 0, np.float32(0), np.float32(127) / amax).astype(np.float32)
        codes = np.nan_to_num(np.rint(x * inverse[..., None]), posinf=127, neginf=-127)
        return codes.astype(np.int8), amax / np.float32(127)


def decoded(codes: Array, kind: str) -> Floats:
    """Stored numbers as floats; those of int8 without their scale."""
    if kind == "f16":
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else codes.astype(np.float32)


class Cache:
    """One layer's cache, full of `rubbish` where nothing was stored."""

    def __init__(self, num_slots: int, kv_heads: int, head_dim: int, kind: str, rubbish: float = np.nan) -> None:
        self.kind, self.kv_heads, self.head_dim = kind, kv_heads, head_dim
        tiles = -(-num_slots // 16)
        fill, scale = encoded(np.full(1, rubbish, np.float32), kind)
        self.k = np.full((tiles, kv_heads, head_dim, 16), fill[0])
        self.v = np.full((tiles, kv_heads, 16, head_dim), fill[0])
        self.k_scale = np.full((tiles, kv_heads, 16), scale if kind == "int8" else rubbish, np.float32)
        self.v_scale = self.k_scale.copy()

    def put(self, slots: Array, keys: Floats, values: Floats) -> None:
        """keys and values [R, kv_heads, head_dim]"""
        tile, lane = slots // 16, slots % 16
        self.k[tile, :, :, lane], self.k_scale[tile, :, lane] = encoded(keys, self.kind)
        self.v[tile, :, lane], self.v_scale[tile, :, lane] = encoded(values, self.kind)

    def get(self, slots: Array) -> tuple[Floats, Floats, Floats, Floats]:
        """Keys and values [R, kv_heads, head_dim] without scales, and the two scales [R, kv_heads]."""
        tile, lane = slots // 16, slots % 16
        keys, values = decoded(self.k[tile, :, :, lane], self.kind), decoded(self.v[tile, :, lane], self.kind)
        return keys, values, self.k_scale[tile, :, lane], self.v_scale[tile, :, lane]

    def fields(self) -> Values:
        scales: Values = {"k_scale": self.k_scale, "v_scale": self.v_scale} if self.kind == "int8" else {}
        return {"kv_type": KINDS.index(self.kind), "k": self.k, "v": self.v, "kv_heads": self.kv_heads} | scales
