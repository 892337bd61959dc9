"""A GGUF file as the origin of a packed file: its fingerprint, and its embedding tables.

Called by `engine.library.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace import gguf
from headrace.backends.base import Backend
from headrace.checkpoint.gguf_keys import Reading
from headrace.checkpoint.gguf_parts import FLOATS, float_rows, raw_rows
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import blocks_of
from headrace.quant.schemes import K_TYPES


class GGUFOrigin:
    """`checkpoint.packing.Origin` of a GGUF file."""

    def __init__(self, path: Path, file: GGUF, reading: Reading, backend: Backend, exact: bool) -> None:
        self.path = path
        self.directory = path.parent
        self.names = list(reading.parts)
        self.files = gguf.files_of(path)
        self.mark = f"gguf-{path.stem}-"
        self._file, self._reading, self._backend, self._exact = file, reading, backend, exact

    def config(self) -> bytes:
        """Return nothing: the config is in the file, whose size and time are in the fingerprint."""
        return b""

    def table(self, name: str, shape: tuple[int, int]) -> Any:
        """Return an embedding table [V, H], mapped: floats, or rows of blocks. Raises `CheckpointError` for another
        shape."""
        part = self._reading.parts.get(name)
        if part is None or part.shape != shape:
            raise CheckpointError(f"{self._file.name} has no {name} of shape {list(shape)}")
        kind = part.info.type
        raw = raw_rows(self._file, part)
        if kind in FLOATS:
            return float_rows(raw, kind)
        if kind in self._backend.block_tables and not self._exact:
            return blocks_of(raw, kind, K_TYPES[kind].size)
        from headrace.checkpoint.gguf_source import GGUFFormat

        return GGUFFormat(self._file, self._reading, self._backend, self._exact).floats(name, shape)
