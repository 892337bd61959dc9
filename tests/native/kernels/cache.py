"""A native KV cache in numpy: the layout of csrc/include/kernels.h, written here once more and independently."""

from __future__ import annotations

import numpy as np
from tests.native.kernels.calls import Array, Floats, Values

from headrace import _native

KINDS = ("f32", "f16", "bf16", "int8", "int4", "e4m3", "e5m2", "int8_dot")
SCALED = ("int8", "int4", "e4m3", "int8_dot")
ISAS: list[str] = _native.isas()


def to_bf16(x: Floats) -> Array:
    """Rounded to nearest even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16 | 0x40).astype(np.uint16), rounded)


def from_bf16(bits: Array) -> Floats:
    result: Floats = (bits.astype(np.uint32) << 16).view(np.float32)
    return result


def to_half_byte(x: Floats, num_bits: int, drop: int) -> Array:
    """x rounded to `num_bits` of fraction at the exponents of a half: its bits without the last `drop`."""
    _, exponent = np.frexp(np.abs(x.astype(np.float64)))
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -14) - num_bits)
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.rint(x / quantum) * quantum).astype(np.float16).view(np.uint16) >> drop


def encoded(x: Floats, kind: str) -> tuple[Array, Floats]:
    """x [..., head_dim] -> what the cache stores of it, not yet packed, and scales [...] (ones without; for
    int4 [..., 2], step and least)."""
    ones = np.ones(x.shape[:-1], np.float32)
    if kind == "f32":
        return x, ones
    with np.errstate(all="ignore"):
        if kind == "f16":
            return x.astype(np.float16).view(np.uint16), ones
        if kind == "bf16":
            return to_bf16(x), ones
        if kind == "e5m2":
            return to_half_byte(x, 2, 8).astype(np.uint8), ones
        if kind == "int4":
            low, high = x.min(-1), x.max(-1)
            bad = (x * np.float32(0)).sum(-1)
            step = from_bf16(to_bf16((high - low) / np.float32(15) + bad))
            least = from_bf16(to_bf16(low + bad))
            inverse = np.where(step > 0, np.float32(1) / step, np.float32(0)).astype(np.float32)
            codes = np.rint((x - least[..., None]) * inverse[..., None])
            return np.clip(np.nan_to_num(codes), 0, 15).astype(np.uint8), np.stack([step, least], -1)
        amax = np.abs(x).max(-1)
        most = np.float32(1.75 if kind == "e4m3" else 127)
        inverse = np.where(amax == 0, np.float32(0), most / amax).astype(np.float32)
        if kind == "e4m3":
            halves = to_half_byte(np.clip(x * inverse[..., None], -most, most), 3, 7)
            return (halves >> 1 & 0x80 | halves & 0x7F).astype(np.uint8), amax / most
        codes = np.nan_to_num(np.rint(x * inverse[..., None]), posinf=127, neginf=-127)
        return codes.astype(np.int8), amax / most


def decoded(codes: Array, kind: str) -> Floats:
    """Stored numbers as floats, without their scale."""
    if kind == "f16":
        return codes.view(np.float16).astype(np.float32)
    if kind == "e5m2":
        return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if kind == "e4m3":
        sign, rest = codes.astype(np.uint16) >> 7, codes.astype(np.uint16) & 0x7F
        return (sign << 15 | rest << 7).view(np.float16).astype(np.float32)
    return from_bf16(codes) if kind == "bf16" else codes.astype(np.float32)


def places(head_dim: int, what: str) -> list[tuple[int, int]]:
    """The byte of each channel of int4, and the bit where it begins."""
    if what == "key":
        return [(d // 2, 4 * (d % 2)) for d in range(head_dim)]
    return [(d // 32 * 16 + d % 16, 4 * (d % 32 // 16)) for d in range(head_dim)]


class Cache:
    """One layer's cache, full of `rubbish` where nothing was stored. shares: the values are a part of the keys."""

    def __init__(
        self, num_slots: int, kv_heads: int, head_dim: int, kind: str, rubbish: float = np.nan, value_dim: int = 0,
        shares: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.kv_heads, self.value_dim, self.shares = kind, kv_heads, value_dim or head_dim, shares
        self.head_dim = head_dim
        tiles = -(-num_slots // 16)
        fill, scale = encoded(np.full(1, rubbish, np.float32), kind)
        self.packing = {"key": places(head_dim, "key"), "value": places(self.value_dim, "value")}
        rows, row = (
            max(byte for byte, _ in value) + 1 if kind == "int4" else len(value) for value in self.packing.values()
        )
        self.k = np.full((tiles, kv_heads, rows, 16), fill[0])
        self.v = np.full((tiles, kv_heads, 16, row), fill[0])
        if kind == "int8_dot":
            self.k = np.full((tiles, kv_heads, -(-head_dim // 4), 16, 4), fill[0])
            self.v = np.full((tiles, kv_heads, 4, -(-self.value_dim // 16) * 16, 4), fill[0])
        if kind == "int4":
            bits = to_bf16(np.full(1, rubbish, np.float32))[0]
            self.k_scale: Array = np.full((tiles, kv_heads, 2, 16), bits, np.uint16)
        else:
            self.k_scale = np.full((tiles, kv_heads, 16), scale if kind in SCALED else rubbish, np.float32)
        self.v_scale = self.k_scale.copy()

    def put(self, slots: Array, keys: Floats, values: Floats) -> None:
        """keys [R, kv_heads, head_dim] and values [R, kv_heads, value_dim]"""
        tile, lane = slots // 16, slots % 16
        for what, x in (("key", keys), ("value", values))[: 1 if self.shares else 2]:
            codes, scales = encoded(x, self.kind)
            swapaxes = (self.k_scale if what == "key" else self.v_scale).swapaxes(1, -1)  # [tiles, 16, (2,) kv_heads]
            if self.kind == "int4":
                swapaxes[tile, lane] = to_bf16(scales.swapaxes(1, 2))
                codes = self.packed(codes, what)
            else:
                swapaxes[tile, lane] = scales
            if self.kind == "int8_dot":
                for d in range(codes.shape[-1]):
                    if what == "key":
                        self.k[tile, :, d // 4, lane, d % 4] = codes[..., d] ^ -128
                    else:
                        self.v[tile, :, lane // 4, d, lane % 4] = codes[..., d]
            elif what == "key":
                self.k[tile, :, :, lane] = codes
            else:
                self.v[tile, :, lane] = codes

    def packed(self, codes: Array, what: str) -> Array:
        """Codes of int4 [R, kv_heads, head_dim], two in a byte."""
        num_bytes = self.k.shape[2] if what == "key" else self.v.shape[3]
        values = np.zeros((*codes.shape[:-1], num_bytes), np.uint8)
        for d, (byte, bit) in enumerate(self.packing[what]):
            values[..., byte] |= codes[..., d] << bit
        return values

    def get(self, slots: Array) -> tuple[Floats, Floats, Floats, Floats]:
        """Keys and values [R, kv_heads, D] without scales, and the two scales [R, kv_heads] (int4: [..., 2])."""
        tile, lane = slots // 16, slots % 16
        result = []
        if self.kind == "int8_dot":
            keys = self.k[tile, :, :, lane].reshape(len(slots), self.kv_heads, -1)[..., : self.head_dim] ^ -128
            stored = [keys, self.v[tile, :, lane // 4, :, lane % 4][..., : self.value_dim]]
        else:
            stored = [self.k[tile, :, :, lane], self.v[tile, :, lane]]
        for what, codes in zip(("key", "value"), stored, strict=True):
            if self.kind == "int4":
                codes = np.stack([codes[..., byte] >> bit & 15 for byte, bit in self.packing[what]], -1)
            result.append(decoded(codes, self.kind))
        scales = [scale.swapaxes(1, -1)[tile, lane] for scale in (self.k_scale, self.v_scale)]
        if self.kind == "int4":
            scales = [from_bf16(scale).swapaxes(1, 2) for scale in scales]
        if self.shares:
            return result[0], result[0][..., : self.value_dim], scales[0], scales[0]
        return result[0], result[1], scales[0], scales[1]

    def fields(self) -> Values:
        keys: Values = {"k": self.k} | ({"k_scale": self.k_scale} if self.kind in SCALED else {})
        values: Values = {"v": self.v} | ({"v_scale": self.v_scale} if self.kind in SCALED else {})
        sizes = {"kv_type": KINDS.index(self.kind), "kv_heads": self.kv_heads, "value_dim": self.value_dim}
        return sizes | keys | ({} if self.shares else values)
