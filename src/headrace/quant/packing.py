"""What the checkpoint formats have in common: codes out of packed words, checked tensors, lists of layers left alone.

Nothing here believes a checkpoint: every shape, type and number that a format builds on is checked, and what does not
fit is a `CheckpointError` naming tensor, shape and what was expected. Called by the formats `quant/<quant_method>.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import PLAIN, QWeight, Tensors

MAX_PATTERN = 256
MAX_REPEATS = 4
"""Open repetitions in a pattern of a config."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of 4-bit floats (OCP Microscaling Formats 1.0, section 5.3.3)."""


def checked(tensors: Tensors, name: str, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> Tensor:
    """The tensor `name`, of that shape (None: any size from 1 on) and one of those types (none given: plain floats)."""
    found = tensors(name)
    fits = len(found.shape) == len(shape) and all(
        size == expected or (expected is None and size > 0) for size, expected in zip(found.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise CheckpointError(f"{name} has shape {list(found.shape)}, expected [{expected}]")
    wanted = dtypes or PLAIN
    if found.dtype not in wanted:
        names = ", ".join(_short(dtype) for dtype in wanted)
        raise CheckpointError(f"{name} is stored as {_short(found.dtype)}, expected {names}")
    return found


def good_scales(scales: Tensor, name: str) -> Tensor:
    """Scales as float32. Raises `CheckpointError` if they are no floats, one is no number, or all of them are 0."""
    if scales.dtype not in PLAIN:
        raise CheckpointError(f"{name} is stored as {_short(scales.dtype)}, expected plain floats")
    made = scales.float()
    if not bool(torch.isfinite(made).all()):
        raise CheckpointError(f"{name} has a scale that is not finite; shape {list(scales.shape)}, expected numbers")
    if made.numel() and not bool(made.any()):
        raise CheckpointError(f"{name} has only zeros; shape {list(scales.shape)}, expected scales")
    return made


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of `bits` (1 to 8) of each row of int32 words [rows, n], as uint8 [rows, count].

    Code j is bits j * bits ... of the row's words taken as one little-endian number, whether or not it ends in the
    word in which it begins.
    """
    rows = words.contiguous().view(torch.uint8)
    if bits == 8:
        return rows[:, :count].contiguous()
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        per_byte = 8 // bits
        made = torch.empty(*rows.shape, per_byte, dtype=torch.uint8)
        for i in range(per_byte):
            torch.bitwise_and(rows >> (bits * i), mask, out=made[:, :, i])
        return made.flatten(1)[:, :count]
    # `bits` bytes hold 8 codes; each lies in one byte or in two neighbours.
    octs = -(-count // 8)
    padded = torch.zeros(rows.shape[0], octs * bits, dtype=torch.uint8)
    padded[:, : min(rows.shape[1], octs * bits)] = rows[:, : octs * bits]
    parts = padded.view(rows.shape[0], octs, bits)
    made = torch.empty(rows.shape[0], octs, 8, dtype=torch.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        code = parts[:, :, byte] >> shift
        if shift + bits > 8:
            code = code | parts[:, :, byte + 1] << (8 - shift)
        made[:, :, i] = code & mask
    return made.flatten(1)[:, :count]


def num_words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def nibbles(packed: Tensor, high_first: bool) -> Tensor:
    """Two codes out of each byte of [rows, n] -> uint8 [rows, 2 * n]."""
    high, low = packed >> 4, packed & 15
    return torch.stack((high, low) if high_first else (low, high), -1).flatten(1)


def by_index(codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor, group: int, bits: int, name: str,
             codebook: Tensor | None = None) -> QWeight:  # fmt: skip
    """Codes [out, in] whose input j has the scale (and zero) of group g_idx[j]; scales, zeros [out, groups]."""
    num_in, num_groups = codes.shape[1], scales.shape[1]
    index = g_idx.long()
    if bool((index < 0).any() or (index >= num_groups).any()):
        raise CheckpointError(
            f"{name} has groups {int(index.min())} to {int(index.max())}; shape {list(g_idx.shape)}, expected 0 to "
            f"{num_groups - 1}"
        )
    plain = torch.arange(num_in) // group
    if torch.equal(index, plain):
        return QWeight(codes, scales, zeros, group=group, bits=bits, codebook=codebook)
    order = torch.argsort(index, stable=True)
    if torch.equal(index[order], plain):
        return QWeight(codes[:, order], scales, zeros, group=group, bits=bits, permutation=order, codebook=codebook)
    # Groups of unequal size: every input gets a group of its own.
    each = QWeight(codes, scales[:, index], None if zeros is None else zeros[:, index], None, 1, bits)
    return QWeight(each.dequantize())


def over_blocks(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Scales [row blocks, column blocks] as [out, column blocks]."""
    return scales if block[0] == 1 else scales.repeat_interleave(block[0], 0)[: shape[0]]


def names_listed(config: dict[str, Any], *keys: str) -> list[str]:
    """The lists of layers under `keys` of a quantization_config, as one."""
    found: list[str] = []
    for key in keys:
        value = config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise CheckpointError(f"quantization_config: {key} is {value!r:.80}, expected a list of names")
        found += value or []
    return found


def left_alone(name: str, layers: Sequence[str]) -> bool:
    """Whether a list of layers names `name`: itself, a module that it is in, or its last parts."""
    return any(name == text or name.startswith(f"{text}.") or name.endswith(f".{text}") or f".{text}." in name
               for text in layers)  # fmt: skip


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression out of a config fits the beginning of `name`; refused if it could take long."""
    # A repeated group can take exponential time, and each open repetition one more power of the name's length.
    repeats = len(re.findall(r"[*+{]", pattern))
    if len(pattern) > MAX_PATTERN or repeats > MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        raise CheckpointError(
            f"quantization_config: the pattern {pattern!r:.80} is too complicated to be matched safely"
        )
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r:.80} is no regular expression: {error}") from error


def whole(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number out of a quantization_config."""
    value = config.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"quantization_config: {key} is {value!r:.80}, expected a whole number")
    return value


def plain_weight(tensors: Tensors, name: str) -> QWeight:
    """`<name>.weight` of a layer that was not quantised."""
    weight = checked(tensors, f"{name}.weight", (None, None))
    return QWeight(weight, bits=8 * weight.element_size())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
