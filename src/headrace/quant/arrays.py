"""Arrays of weights: dtypes for the floats that numpy lacks, conversions between floats, and stacking.

bfloat16 and the 8-bit floats are dtypes of one field, which is named after the type and holds its bits: views, slices
and stacks keep the type, `floats` returns the numbers. So are GGUF's blocks, an element a block. Types go by their
names, which are also torch's. Imports no torch; functions that are marked so also take torch's tensors, which
`quantize` and the backends on torch make. Called by `quant`, by the readers of checkpoints, and by the backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.foreign import Mapped

Array = Any
"""A numpy array, or a torch tensor."""

BF16 = np.dtype([("bfloat16", "<u2")])
E4M3 = np.dtype([("float8_e4m3fn", "u1")])
E5M2 = np.dtype([("float8_e5m2", "u1")])

PLAIN = ("float32", "bfloat16", "float16", "float64")
"""Types whose numbers are the weights themselves."""


def type_name(values: Array) -> str:
    """Return the name of the type of an array, or of a tensor."""
    dtype = values.dtype
    if isinstance(dtype, np.dtype):
        return dtype.names[0] if dtype.names else dtype.name
    return str(dtype).removeprefix("torch.")


def place_of(values: NDArray[Any]) -> tuple[int, int] | None:
    """Return the descriptor of the file that is mapped as these values, and their first byte there; None for others."""
    owner: Any = values
    while isinstance(owner, np.ndarray):
        owner = owner.base
    owner = owner.obj if isinstance(owner, memoryview) else owner
    if not isinstance(owner, Mapped):
        return None
    return owner.descriptor, values.ctypes.data - np.frombuffer(owner, np.uint8, 1).ctypes.data


def blocks_of(raw: NDArray[np.uint8], kind: str, size: int) -> NDArray[Any]:
    """Return rows of blocks of `size` bytes, uint8 [rows, bytes], as [rows, blocks] of the type `kind`."""
    return raw.view(np.dtype([(kind, "u1", (size,))]))


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return floats that numpy lacks as unsigned integers of their bits, and other arrays as they are."""
    return values.view(f"u{values.itemsize}") if values.dtype.names else values


def floats(values: Array) -> Array:
    """Return numbers as float32. Also takes tensors."""
    if not isinstance(values, np.ndarray):
        return values.float()
    if values.dtype == BF16:
        return np.asarray(bits_of(values).astype(np.uint32) << 16).view(np.float32)
    if values.dtype in (E4M3, E5M2):
        return np.asarray(_of_bytes(type_name(values))[bits_of(values)])
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32, copy=False)


def cast(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return floats as numbers of the type `name` (float32, float16 or bfloat16), rounded to nearest, ties to even."""
    if type_name(values) == name:
        return values
    wide: NDArray[np.float32] = floats(values)
    if name == "float32":
        return wide
    if name == "float16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16)
    words = wide.view(np.uint32)
    rounded = (words + (0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    return rounded.view(BF16)


def half(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return the nearest float16 of each number, as float32; infinity beyond it."""
    return cast(values, "float16").astype(np.float32)


def joined(parts: Sequence[Array]) -> Array:
    """Return arrays one after the other, as float32 if they are floats of different types. Also takes tensors."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        is_mixed = len({type_name(part) for part in parts}) > 1
        return np.concatenate([floats(part) for part in parts] if is_mixed else parts)
    import torch

    return torch.cat(list(parts))


def repeated(values: Array, times: int) -> Array:
    """Return [n, m] as [n, m * times], each number several times. Also takes tensors."""
    return values.repeat(times, 1) if isinstance(values, np.ndarray) else values.repeat_interleave(times, 1)


def looked_up(table: Array, codes: Array) -> Array:
    """Return the entry of `table` for each code. Also takes tensors."""
    if isinstance(codes, np.ndarray):
        return table[codes]
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


@cache
def _of_bytes(name: str) -> NDArray[np.float32]:
    """Return the numbers of the 256 codes of an 8-bit float (Micikevicius et al. 2022, table 1)."""
    codes = np.arange(256)
    digits = 3 if name == "float8_e4m3fn" else 2
    bias = 7 if digits == 3 else 15
    exponent, fraction = codes >> digits & (127 >> digits), (codes & ((1 << digits) - 1)) / (1 << digits)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if digits == 3:
        values[codes & 127 == 127] = np.nan
    else:
        values[codes & 127 == 124] = np.inf
        values[codes & 127 > 124] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)
