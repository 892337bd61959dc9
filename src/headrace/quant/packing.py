"""The common parts of the checkpoint formats: codes out of packed words, verified tensors, values of settings.

Every shape, type and number that a format relies on is verified; a wrong one is a `CheckpointError` that names the
tensor, its shape and the expected one. Called by the formats `quant/<quant_method>.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, floats, type_name
from headrace.quant.base import QWeight, Tensors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of 4-bit floats (OCP Microscaling Formats 1.0, section 5.3.3)."""


def checked(tensors: Tensors, name: str, shape: tuple[int | None, ...], *dtypes: str) -> NDArray[Any]:
    """The tensor `name`, verified to have that shape (None: any size from 1 on) and one of `dtypes` (plain floats)."""
    tensor = tensors(name)
    fits = len(tensor.shape) == len(shape) and all(
        size == expected or (expected is None and size > 0) for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected [{expected}]")
    dtypes = dtypes or PLAIN
    if type_name(tensor) not in dtypes:
        raise CheckpointError(f"{name} is stored as {type_name(tensor)}, expected {', '.join(dtypes)}")
    return tensor


def good_scales(scales: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Scales as float32. Raises `CheckpointError` if they are no floats, one is no number, or all of them are 0."""
    if type_name(scales) not in PLAIN:
        raise CheckpointError(f"{name} is stored as {type_name(scales)}, expected plain floats")
    wide: NDArray[np.float32] = floats(scales)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"{name} has a scale that is not finite; shape {list(scales.shape)}, expected numbers")
    if wide.size and not wide.any():
        raise CheckpointError(f"{name} has only zeros; shape {list(scales.shape)}, expected scales")
    return wide


def one_scale(tensors: Tensors, name: str) -> NDArray[np.float32]:
    """The scale of a whole matrix, float32 [1, 1]."""
    scale = good_scales(tensors(name), name)
    if scale.size != 1:
        raise CheckpointError(f"{name} has shape {list(scale.shape)}, expected [1]")
    return scale.reshape(1, 1)


def two_sizes(values: Any, what: str) -> tuple[int, int]:
    """`values` if it is a list of two sizes; `what` is its name for the error."""
    if isinstance(values, list) and len(values) == 2 and all(type(size) is int and size > 0 for size in values):
        return values[0], values[1]
    raise CheckpointError(f"{what} is {values!r:.80}, expected two whole numbers")


def unpacked(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` codes of `bits` (1 to 8) of each row of int32 words [rows, n], as uint8 [rows, count].

    Code j is the bits from j * bits on of the row's words as one little-endian number; it may lie in two words.
    """
    rows = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return np.ascontiguousarray(rows[:, :count])
    mask = np.uint8((1 << bits) - 1)
    if 8 % bits == 0:
        per_byte = 8 // bits
        codes = np.empty((*rows.shape, per_byte), np.uint8)
        for i in range(per_byte):
            np.bitwise_and(rows >> (bits * i), mask, out=codes[:, :, i])
        return codes.reshape(len(rows), -1)[:, :count]
    # `bits` bytes hold 8 codes; each lies in one byte or in two neighbours.
    octs = -(-count // 8)
    padded = np.zeros((len(rows), octs * bits), np.uint8)
    padded[:, : min(rows.shape[1], octs * bits)] = rows[:, : octs * bits]
    parts = padded.reshape(len(rows), octs, bits)
    codes = np.empty((len(rows), octs, 8), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        code = parts[:, :, byte] >> shift
        if shift + bits > 8:
            code = code | parts[:, :, byte + 1] << (8 - shift)
        codes[:, :, i] = code & mask
    return codes.reshape(len(rows), -1)[:, :count]


def num_words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def nibbles(packed: NDArray[np.uint8], high_first: bool) -> NDArray[np.uint8]:
    """Two codes out of each byte of [rows, n] -> uint8 [rows, 2 * n]."""
    high, low = packed >> 4, packed & 15
    return np.stack((high, low) if high_first else (low, high), -1).reshape(len(packed), -1)


def four_bit_floats(pairs: NDArray[np.uint8], scales: NDArray[np.float32], group: int) -> QWeight:
    """E2M1 codes, two in each byte of [out, in / 2] with the lower half first, and scales float32 [out, groups]."""
    return QWeight(nibbles(pairs, False), scales, group=group, bits=4, codebook=np.array(E2M1, np.float32))


def signed(codes: NDArray[np.int8], scales: NDArray[np.float32], zeros: NDArray[Any] | None, group: int, bits: int,
           name: str) -> QWeight:  # fmt: skip
    """Codes int8 [out, in], from -2^(bits - 1) on, with scales and zero points [out, groups]. Codes of 6 bits at most
    become unsigned, as the kernels of few bits take them. `name`: of the codes."""
    zeros = None if zeros is None or not zeros.any() else zeros
    half = 2 ** (bits - 1)
    if ((codes < -half) | (codes >= half)).any():
        raise CheckpointError(f"{name}, shape {list(codes.shape)}, has codes beyond {bits} bits")
    if bits > 6:
        return QWeight(codes, scales, zeros, group=group, bits=bits)
    middle = np.full_like(scales, half) if zeros is None else zeros + half
    return QWeight((codes + half).astype(np.uint8), scales, middle, group=group, bits=bits)


def by_index(codes: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | None, g_idx: NDArray[Any], group: int,
             bits: int, name: str) -> QWeight:  # fmt: skip
    """Codes [out, in] whose input j has the scale (and zero) of group g_idx[j]; scales, zeros [out, groups].

    Some writers never fill the index: all -1, or all 0 where there are several groups. Then the groups are in order."""
    num_in, num_groups = codes.shape[1], scales.shape[1]
    index = g_idx.astype(np.int64)
    if (index == -1).all() or (num_groups > 1 and not index.any()):
        return QWeight(codes, scales, zeros, group=group, bits=bits)
    if ((index < 0) | (index >= num_groups)).any():
        raise CheckpointError(
            f"{name} has groups {int(index.min())} to {int(index.max())}; shape {list(g_idx.shape)}, expected 0 to "
            f"{num_groups - 1}"
        )
    plain = np.arange(num_in) // group
    if np.array_equal(index, plain):
        return QWeight(codes, scales, zeros, group=group, bits=bits)
    order = np.argsort(index, kind="stable")
    if np.array_equal(index[order], plain):
        return QWeight(codes[:, order], scales, zeros, group=group, bits=bits, permutation=order)
    # Groups of unequal size: every input becomes a group.
    each = QWeight(codes, scales[:, index], None if zeros is None else zeros[:, index], None, 1, bits)
    return QWeight(each.dequantize())


def overridden(config: dict[str, Any], settings: Any, key: str, *names: str) -> dict[str, Any]:
    """`config` with the entries of `settings` that `names` lists. Raises `CheckpointError` naming `key` if it is no
    object."""
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: quantization_config.{key} has {settings!r:.80}, expected an object")
    return config | {name: settings[name] for name in names if settings.get(name) is not None}


def whole(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A value of a quantization_config that must be an integer."""
    value = config.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"config.json: quantization_config.{key} is {value!r:.80}, expected a whole number")
    return value


def group_of(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The inputs that share a scale, by a quantization_config; -1: all of a row."""
    group = whole(config, key, default)
    if group < 1 and group != -1:
        raise CheckpointError(f"config.json: quantization_config.{key} is {group}, expected 1 or more, or -1 for a row")
    return group


def plain_weight(tensors: Tensors, name: str) -> QWeight:
    """`<name>.weight` of a layer that was not quantised."""
    weight = checked(tensors, f"{name}.weight", (None, None))
    return QWeight(weight, bits=8 * weight.itemsize)
