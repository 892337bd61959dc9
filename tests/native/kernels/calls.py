"""Single native operators on numpy arrays, and the arithmetic that csrc/include/kernels.h is written in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.backends.native import fields, pack

_native = pytest.importorskip("headrace._native", exc_type=ImportError)

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
Values = dict[str, Any]
ISAS: list[str] = _native.isas()
FAST = ISAS[1:]  # all but scalar, the oracle
SILU, GELU, GELU_TANH, RELU, SIGMOID, RELU2, IDENTITY, CLAMPED_SWIGLU = range(8)
F32, F16, BF16 = range(3)
CANARY = np.float32(-7.25e30)


def call(op: str, isa: str, count: int, /, *, num_threads: int = 1, **values: Array | float | None) -> list[int]:
    """Run one operator on `count` rows; arrays go by address, fields not named are 0. Returns the free dims."""
    args: dict[str, float] = {}
    for name, kind in fields()[op][1].items():
        value = values.pop(name, None)
        if isinstance(value, np.ndarray):
            assert (kind, value.flags.c_contiguous) == ("p", True), f"{op}.{name}"
            args[name] = value.ctypes.data
        else:
            args[name] = (0.0 if kind == "f" else 0) if value is None else value
    assert not values, f"{op} has no {sorted(values)}"
    tape = _native.Tape(isa)
    tape.add(op, pack(op, **args))
    tape.run([count, count, count], num_threads)
    return list(tape.dims()[3:])


def padded(rows: int, width: int, extra: int = 5) -> Floats:
    """[rows, width + extra] full of canaries: what a kernel must not write keeps them."""
    return np.full((rows, width + extra), CANARY)


def untouched(array: Floats, width: int) -> bool:
    return bool((array[:, width:] == CANARY).all())


def same(a: Array, b: Array) -> bool:
    """Equal bits; a NaN equals any NaN."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if a.dtype != np.float32:
        return bool((a == b).all())
    bits = np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)
    return bool((bits | (np.isnan(a) & np.isnan(b))).all())


def normals(seed: int, *shape: int, spread: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def fma(a: Array, b: Array, c: Array) -> Floats:
    """a * b + c rounded once to float32. The product is exact in float64; the sum is rounded to odd there, after which
    the second rounding does no harm (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    p, c = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    bits = np.ascontiguousarray(s).view(np.int64)
    odd = np.where(error == 0, bits, np.where((error > 0) == (s > 0), bits | 1, (bits - 1) | 1))
    return odd.view(np.float64).astype(np.float32)


def tree(lanes: Floats) -> Floats:
    """Sum of sixteen lanes (the last axis) in the contract's order."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def lanes_sum(x: Floats, *, squares: bool = False) -> Floats:
    """Sum, or sum of squares by fma, of the last axis in sixteen lanes."""
    lanes = np.zeros((*x.shape[:-1], 16), np.float32)
    for begin in range(0, x.shape[-1], 16):
        part = x[..., begin : begin + 16]
        n = part.shape[-1]
        lanes[..., :n] = fma(part, part, lanes[..., :n]) if squares else lanes[..., :n] + part
    return tree(lanes)


class Quantized:
    """Buffers for quantised rows: codes int8 [rows, ld_q], scales and sums [rows, ld_s]; full of rubbish at first."""

    def __init__(self, rows: int, width: int, group: int, extra: int = 3) -> None:
        self.group, self.ld_q = group, (width + 63) // 64 * 64 + 64
        self.groups = -(-width // group)
        self.q = np.full((rows, self.ld_q), 99, np.int8)
        self.scales = padded(rows, self.groups, extra)
        self.sums = np.full((rows, self.groups + extra), -77, np.int32)

    def fields(self) -> Values:
        ld_s = self.scales.shape[1]
        return {
            "q": self.q,
            "ld_q": self.ld_q,
            "scales": self.scales,
            "sums": self.sums,
            "ld_s": ld_s,
            "group": self.group,
        }

    def agrees(self, other: Quantized) -> bool:
        """Padding of codes counts; what lies behind the last group of scales and sums must have been left alone."""
        n = self.groups
        alone = untouched(self.scales, n) and bool((self.sums[:, n:] == -77).all())
        alike = same(self.q, other.q) and same(self.scales[:, :n], other.scales[:, :n])
        return alone and alike and bool((self.sums[:, :n] == other.sums[:, :n]).all())


def quantized(x: Floats, group: int) -> Quantized:
    """What quantisation of x [rows, width] has to give, by the contract's formulas."""
    rows, width = x.shape
    out = Quantized(rows, width, group)
    out.q[:] = 0
    with np.errstate(all="ignore"):
        for g in range(out.groups):
            part = x[:, g * group : (g + 1) * group]
            amax = np.abs(part).max(1) + (part * np.float32(0)).sum(1)
            inv = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
            codes = np.nan_to_num(np.clip(np.rint(part * inv[:, None]), -127, 127), nan=0.0).astype(np.int8)
            out.q[:, g * group : g * group + part.shape[1]] = codes
            out.scales[:, g] = amax / np.float32(127)
            out.sums[:, g] = codes.astype(np.int32).sum(1)
    return out
