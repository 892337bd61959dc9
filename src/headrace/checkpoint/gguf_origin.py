"""A GGUF file as the origin of a packed file: what identifies it, and its embedding tables.

Imports torch only for tables of blocks that the backend can not look up. Called by `engine.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends.base import Backend
from headrace.checkpoint.gguf_config import FLOATS, Reading, raw_rows
from headrace.checkpoint.mapped import MappedTensor
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError

VIEWS: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Numpy's type for each type of floats; bfloat16 comes as bits."""


class GGUFOrigin:
    """`checkpoint.packing.Origin` of a GGUF file."""

    def __init__(self, path: Path, file: GGUF, reading: Reading, backend: Backend, exact: bool) -> None:
        self.path = path
        self.directory = path.parent
        self.names = list(reading.parts)
        self.files = [path]
        self.mark = f"gguf-{path.stem}-"
        self._file, self._reading, self._backend, self._exact = file, reading, backend, exact

    def config(self) -> bytes:
        """Return nothing: the config is in the file, whose size and time are in the fingerprint."""
        return b""

    def table(self, name: str, shape: tuple[int, int]) -> Any:
        """An embedding table [V, H], mapped: floats, or rows of blocks. Raises `CheckpointError` for another shape."""
        part = self._reading.parts.get(name)
        if part is None or part.shape != shape:
            raise CheckpointError(f"{self._file.name} has no {name} of shape {list(shape)}")
        kind = part.info.type
        raw = raw_rows(self._file, part)
        if kind in VIEWS:
            item = VIEWS[kind]
            aligned = raw if raw.ctypes.data % np.dtype(item).itemsize == 0 else raw.copy()
            return MappedTensor(aligned.reshape(-1).view(item).reshape(shape), FLOATS[kind])
        if kind in self._backend.block_tables and not self._exact:
            return MappedTensor(raw, kind)
        from headrace.checkpoint.gguf_source import GGUFWeights

        return GGUFWeights(self._file, self._reading, self._backend, exact=self._exact).floats(name, shape)
