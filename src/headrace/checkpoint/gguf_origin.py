"""A GGUF file as what was packed: by what it is known again, and its embedding tables. Imports torch only for tables of
blocks that the backend can not look up. Called by `engine.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends.base import Backend
from headrace.checkpoint.gguf_config import BLOCK_BYTES, Reading
from headrace.checkpoint.mapped import MappedTensor
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError

FLOATS = {"F32": ("float32", np.float32), "F16": ("float16", np.float16), "BF16": ("bfloat16", np.uint16)}


class GGUFOrigin:
    """`checkpoint.packed.Origin` of a file whose metadata were read."""

    def __init__(self, path: Path, file: GGUF, reading: Reading, backend: Backend, exact: bool) -> None:
        self.path = path
        self.directory = path.parent
        self.names = list(reading.parts)
        self.files = [path]
        self.mark = f"gguf-{path.stem}-"
        self._file, self._reading, self._backend, self._exact = file, reading, backend, exact

    def config(self) -> bytes:
        """It lies in the file itself, whose size and time are known."""
        return b""

    def table(self, name: str, shape: tuple[int, int]) -> Any:
        """[V, H], mapped: floats, or rows of blocks. Raises `CheckpointError` for another shape."""
        part = self._reading.parts.get(name)
        if part is None or part.shape != shape:
            raise CheckpointError(f"{self._file.name} has no {name} of shape {list(shape)}")
        kind = part.info.type
        elements, size = BLOCK_BYTES[kind]
        row_bytes = shape[1] // elements * size
        begin = part.info.start + part.first * row_bytes
        raw = np.frombuffer(self._file.data, np.uint8, shape[0] * row_bytes, begin)
        if kind in FLOATS:
            dtype, item = FLOATS[kind]
            aligned = raw if raw.ctypes.data % np.dtype(item).itemsize == 0 else raw.copy()
            return MappedTensor(aligned.view(item).reshape(shape), dtype)
        if kind in self._backend.block_tables and not self._exact:
            return MappedTensor(raw.reshape(shape[0], row_bytes), kind)
        from headrace.checkpoint.gguf_source import GGUFWeights

        return GGUFWeights(self._file, self._reading, self._backend, exact=self._exact).floats(name, shape)
