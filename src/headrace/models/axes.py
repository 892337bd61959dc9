"""Rotary positions on three axes, time, line and column: M-RoPE of Qwen's models that read pictures (Wang et al. 2024).

A pair of a head turns by one of them. Rows of text have the same position on all. Called by the model files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Axes, RopeTable
from headrace.backends.places import SPARE_ROWS
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError

KEY = "mrope_section"


def by_axes(table: RopeTable, of_pairs: NDArray[np.int64], num_spare: int = SPARE_ROWS) -> RopeTable:
    """Return a table of which pair i turns by axis of_pairs[i], with `num_spare` rows behind it for each step."""
    spare = np.zeros((num_spare, table.cos.shape[1]), np.float32)
    cos, sin = (np.concatenate([numbers, spare]) for numbers in (table.cos, table.sin))
    return table._replace(cos=cos, sin=sin, axes=Axes(of_pairs, len(table.cos)))


def in_turn(table: RopeTable, rope: ModelConfig, default: tuple[int, int, int]) -> RopeTable:
    """Return the table of a model whose axes take pairs in turn, line and column up to their number: Qwen3-VL's."""
    num_pairs = table.cos.shape[1]
    of_pairs = np.zeros(num_pairs, np.int64)
    for axis, num in enumerate(_numbers(rope, default)):
        of_pairs[axis : 3 * num : 3] = axis
    return by_axes(table, of_pairs)


def in_sections(table: RopeTable, rope: ModelConfig, default: tuple[int, int, int]) -> RopeTable:
    """Return the table of a model whose axes take pairs one after the other: Qwen2-VL's. Where their number is another
    one, the table has one axis, and only text can be read."""
    numbers = _numbers(rope, default)
    return by_axes(table, np.repeat(np.arange(3), numbers)) if sum(numbers) == table.cos.shape[1] else table


def _numbers(rope: ModelConfig, default: tuple[int, int, int]) -> list[int]:
    """Return how many pairs each axis has. Raises `CheckpointError`."""
    numbers = rope.values.get(KEY, list(default))
    if not (
        isinstance(numbers, list) and len(numbers) == 3 and all(type(n) is int and 0 <= n < 2**14 for n in numbers)
    ):
        raise CheckpointError(f"config.json: {KEY} is {numbers!r:.80}, expected three numbers of pairs")
    return numbers
