"""The base of all readers of weights: `Parts`, which counts the tensors that the model has taken, and progress.

Also `ResidentBytes`, which keeps a mapped file from staying in memory as a whole. Knows no file formats and imports no
torch. Called by the readers: safetensors, packed and GGUF files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable

from headrace.models.weights import Weights

Progress = Callable[[int, int], None]
"""Called with (parts taken so far, parts in all)."""

RELEASE_BYTES = 32 * 2**20
"""Bytes of a file that may stay in memory in addition to the rows that are being read."""


class Parts:
    """The parts of a checkpoint that a model has to take. The time to take one does not grow with their number."""

    def __init__(self, names: Iterable[str], on_tensor: Progress | None = None) -> None:
        self.names = frozenset(names)
        self._used: set[str] = set()
        self._on_tensor = on_tensor

    def take(self, name: str) -> bool:
        """Count a part as taken and report progress; return whether it is taken for the first time."""
        is_new = name not in self._used
        self._used.add(name)
        if self._on_tensor is not None:
            self._on_tensor(len(self._used), len(self.names))
        return is_new

    def leave(self, is_left: Callable[[str], bool]) -> None:
        """Count the parts for which `is_left` is true as taken."""
        self._used |= set(filter(is_left, self.names))

    def not_taken(self) -> list[str]:
        return sorted(self.names - self._used)


class Reader(Weights):
    """`Weights` out of some file. `names`: the checkpoint's tensors. `parts`: the tensors that a model has to take."""

    def __init__(self, names: frozenset[str], parts: Parts) -> None:
        self._names, self._parts = names, parts

    def has(self, name: str) -> bool:
        return name in self._names

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._names)

    def leave(self, is_left: Callable[[str], bool]) -> None:
        """Count the parts for which `is_left` is true as taken without reading them: another process takes them."""
        self._parts.leave(is_left)

    @abstractmethod
    def finish(self) -> None:
        """Release memory and log a summary. Raises `CheckpointError` if the model did not take every part."""
        ...


class ResidentBytes:
    """Counts the bytes of a mapping that were read since its pages were last released."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def exceeded_by(self, num_bytes: int) -> bool:
        """Count bytes that are about to be read; return whether the pages should be released first."""
        self._num_bytes += num_bytes
        if self._num_bytes <= RELEASE_BYTES:
            return False
        self._num_bytes = 0
        return True
