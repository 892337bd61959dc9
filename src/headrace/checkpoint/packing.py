"""The protocols of `checkpoint.packed`: a backend with layouts, its matrices, and the checkpoint that is packed.

Knows no file formats and imports no torch. Called by `checkpoint.packed` and the readers of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend, Ops
from headrace.quant.schemes import Scheme


class Packable(Protocol):
    """A backend's matrix that can be written."""

    @property
    def packed(self) -> NDArray[np.uint8]: ...
    @property
    def scheme(self) -> Scheme: ...
    @property
    def num_in(self) -> int: ...
    @property
    def num_out(self) -> int: ...
    @property
    def permutation(self) -> NDArray[np.int32] | None: ...


class MixingOps(Ops, Protocol):
    """The operators of a `MixingBackend`."""

    def stacked(self, name: str, matrices: Sequence[Any]) -> Any:
        """Return matrices of several forms over the same inputs as one, their outputs one after the other."""
        ...


class MixingBackend(Backend, Protocol):
    """A backend whose matrices may each have parts of several forms."""

    ops: MixingOps


def mixes(backend: Backend) -> TypeGuard[MixingBackend]:
    return backend.mixes


class PackedOps(MixingOps, Protocol):
    """The operators of a `PackedBackend`."""

    def packed(self, matrix: Any) -> Any:
        """Return a mapped matrix (`checkpoint.packed.PackedMatrix`) as the backend's."""
        ...


class PackedBackend(Backend, Protocol):
    """A backend with layouts: its matrices can be kept in a file and mapped."""

    ops: PackedOps

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory for matrices that is read fast, starting on a page. Raises MemoryError."""
        ...

    def packed_bytes(self, scheme: Scheme, num_out: int, num_in: int) -> int:
        """Return the size of a packed matrix."""
        ...

    def keep_losses(self, path: Path, max_model_len: int, may_write: bool) -> None:
        """Keep measurements of the weights, in a model of `max_model_len` positions, in the file `path`, for the next
        start; write it if `may_write`."""
        ...


def has_layouts(backend: Backend) -> TypeGuard[PackedBackend]:
    """Return whether the matrices of `backend` can be kept in a file, mapped and stacked."""
    return bool(backend.layouts())


class Origin(Protocol):
    """The checkpoint that is packed: a `MappedCheckpoint`, or a GGUF file (`checkpoint.gguf_origin`)."""

    @property
    def directory(self) -> Path: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def files(self) -> list[Path]: ...
    @property
    def mark(self) -> str: ...

    def config(self) -> bytes: ...

    def table(self, name: str, shape: tuple[int, int]) -> Any:
        """Return an embedding table as `PackedBackend.table` takes it."""
        ...
