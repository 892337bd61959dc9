"""The tensors of a tower for pictures, in a directory of safetensors files that holds a text model too.

A convolution over patches is a linear layer of their numbers: its weights are given with two dimensions. Knows no
models. Called by `engine.library.towers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.headers import Entry
from headrace.checkpoint.names import Place, tower_places
from headrace.checkpoint.tensors import Checkpoint
from headrace.quant.arrays import floats


class TowerCheckpoint(Checkpoint):
    """The tensors of a directory's tower by name. scaled: tensors whose rows are multiplied by the numbers of another
    one (LayerScale, Touvron et al. 2021): regular expressions of names, and the other one's name."""

    def __init__(self, directory: Path, scaled: Mapping[str, str] | None = None) -> None:
        super().__init__(directory)
        self._scaled = scaled or {}

    @staticmethod
    def places_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Place]:
        return tower_places(shapes)

    def entry(self, name: str) -> Entry:
        entry = super().entry(name)
        if len(entry.shape) < 4:
            return entry
        return Entry(entry.dtype, (entry.shape[0], math.prod(entry.shape[1:])), entry.begin, entry.end)

    def array(self, name: str) -> NDArray[Any]:
        values = super().array(name)
        if values.ndim >= 4:
            values = values.reshape(values.shape[0], -1)
        for pattern, other in self._scaled.items():
            match = re.fullmatch(pattern, name)
            if match is not None and (factors := match.expand(other)) in self.names:
                column = floats(super().array(factors))
                values = np.ascontiguousarray(floats(values) * (column if values.ndim == 1 else column[:, None]))
        return values
