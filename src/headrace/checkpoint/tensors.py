"""The tensors of a directory of safetensors files, while weights are read: `Checkpoint` keeps few pages of the files in
memory, `LayerTensors` counts the bytes that a format reads.

Knows no models and no quantisation. Called by `checkpoint.loader`, `checkpoint.stacks` and `quantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.checkpoint.reader import Parts, ResidentBytes


class Checkpoint(MappedCheckpoint):
    """The tensors of a directory by name; few pages of their files are in memory at a time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._resident = ResidentBytes()

    def about_to_read(self, num_bytes: int) -> None:
        """Release pages now and then, so that the files are never in memory as a whole."""
        if self._resident.exceeded_by(num_bytes):
            self.release()


class LayerTensors:
    """`quant.base.Tensors` of one layer. num_bytes: of the tensors that this layer was the first to take."""

    def __init__(self, checkpoint: Checkpoint, parts: Parts) -> None:
        self._checkpoint, self._parts = checkpoint, parts
        self.num_bytes = 0

    def __call__(self, name: str) -> NDArray[Any]:
        if not self.has(name):
            raise self._checkpoint.missing(name)
        if self._parts.take(name):
            entry = self._checkpoint.entry(name)
            self.num_bytes += entry.end - entry.begin
        return self._checkpoint.array(name)

    def has(self, name: str) -> bool:
        return name in self._parts.names

    def notes(self, name: str) -> Mapping[str, str]:
        return self._checkpoint.file(name).metadata
