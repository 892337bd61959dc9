"""What all readers of weights share: the names of the parts, which of them the model has taken, and progress.

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
"""Bytes of a file that may stay in memory beside the rows that are being read."""


class Reader(Weights):
    """`Weights` out of some file. Taking a part costs the same however many there are.

    Args:
        names: of the checkpoint's tensors.
        on_tensor: reports progress.
        parts: names of what the model has to take, where that is not the tensors themselves.
    """

    def __init__(
        self, names: Iterable[str], on_tensor: Progress | None = None, parts: Iterable[str] | None = None
    ) -> None:
        self._names = frozenset(names)
        self._parts = self._names if parts is None else frozenset(parts)
        self._used: set[str] = set()
        self._on_tensor = on_tensor

    def has(self, name: str) -> bool:
        return name in self._names

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._names)

    def leave(self, is_left: Callable[[str], bool]) -> None:
        """Count the parts for which `is_left` is true as taken, unread: another process takes them."""
        self._used |= set(filter(is_left, self._parts))

    @abstractmethod
    def finish(self) -> None:
        """Release memory and log what was loaded. Raises `CheckpointError` if the model did not take every part."""
        ...

    def _take(self, part: str) -> bool:
        """Count one of the parts as taken and report progress; return whether it is taken for the first time."""
        is_new = part not in self._used
        self._used.add(part)
        if self._on_tensor is not None:
            self._on_tensor(len(self._used), len(self._parts))
        return is_new

    def _not_taken(self) -> list[str]:
        return sorted(self._parts - self._used)


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
