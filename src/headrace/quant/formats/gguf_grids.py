"""The points that GGUF's IQ types store by number: sets of small vectors, each read from a bitmap in `grids`.

A grid's points are numbered in the order of their values read as digits, the first coordinate least significant, so a
bit for each possible vector defines a grid. The sets are ggml's, which defines the format; files store these numbers.
Called by `quant.formats.gguf_blocks`.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# The values that a coordinate may have, and how many coordinates there are.
_VALUES: dict[str, tuple[tuple[int, ...], int]] = {
    "IQ2_XXS": ((8, 25, 43), 8),
    "IQ2_XS": ((8, 25, 43), 8),
    "IQ2_S": ((8, 25, 43), 8),
    "IQ3_XXS": ((4, 12, 20, 28, 36, 44, 52, 62), 4),
    "IQ3_S": ((1, 3, 5, 7, 9, 11, 13, 15), 4),
    "IQ1_S": ((-1, 0, 1), 8),
}

_FOLDER = Path(__file__).with_name("grids")


@cache
def grid(name: str) -> NDArray[np.int8]:
    """The points of a type's grid, int8 [points, coordinates]."""
    values, width = _VALUES[name]
    bitmap = np.frombuffer(zlib.decompress((_FOLDER / f"{name.lower()}.zlib").read_bytes()), np.uint8)
    numbers = np.flatnonzero(np.unpackbits(bitmap))
    digits = numbers[:, None] // len(values) ** np.arange(width) % len(values)
    points: NDArray[np.int8] = np.array(values, np.int8)[digits]
    return points


@cache
def signs() -> NDArray[np.int8]:
    """+1 and -1 for each bit of a byte, the lowest first: int8 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


@cache
def even_signs() -> NDArray[np.int8]:
    """`signs` of 7 bits and an eighth that makes the number of minus signs even: int8 [128, 8]."""
    seven = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(seven[:, None], axis=1).sum(1) % 2
    signs_of_eight: NDArray[np.int8] = signs()[seven | (parity << 7).astype(np.uint8)]
    return signs_of_eight
