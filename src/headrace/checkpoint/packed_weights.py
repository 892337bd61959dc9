"""`PackedWeights`: a packed file as the weights of a model. Called by `checkpoint.source`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.mapped import stacked_name, verify_shape
from headrace.checkpoint.packed import TABLE, PackedFile
from headrace.checkpoint.packing import Origin, PackedBackend
from headrace.checkpoint.reader import Parts, Progress, Reader
from headrace.models.weights import ByHead, Linear
from headrace.protocol.errors import CheckpointError


class PackedWeights(Reader):
    """A packed file as `models.weights.Weights`.

    Raises `CheckpointError` where the model takes other tensors than were packed: the file was written for another
    version of the model file, and the caller should load the checkpoint instead.
    """

    def __init__(
        self,
        packed: PackedFile,
        checkpoint: Origin,
        backend: PackedBackend,
        on_tensor: Progress | None = None,
    ) -> None:
        super().__init__(frozenset(checkpoint.names), Parts([*packed.matrices, *packed.tensors], on_tensor))
        self._packed = packed
        self._checkpoint = checkpoint
        self._backend = backend

    def constant(self, values: Any) -> Any:
        return self._backend.constant(values)

    def constant_table(self, values: Any) -> Any:
        return self._backend.table(values)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._backend.constant(self.numbers(name, shape), is_weight=True)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = self._packed.tensors.get(name)
        if values is None:
            raise CheckpointError(f"{self._packed.path} lacks {name}")
        verify_shape(name, values.shape, shape)
        self._parts.take(name)
        return values

    def table(self, name: str, shape: tuple[int, int]) -> Any:
        """As `Weights.table`: mapped from the packed file if the table was packed, else from the checkpoint."""
        if TABLE + name not in self._packed.tables:
            return self._backend.table(self._checkpoint.table(name, shape))
        values = self._packed.table(name)
        verify_shape(name, values.shape, shape)
        return self._backend.table(values)

    def matrix(self, linear: Linear) -> Any:
        names, matrices, begin = linear.names, [], 0
        while begin < len(names):  # one matrix, or several of different schemes
            ends = range(len(names), begin, -1)
            end = next((end for end in ends if stacked_name(names[begin:end]) in self._packed.matrices), None)
            if end is None:
                raise CheckpointError(f"{self._packed.path} lacks {stacked_name(names[begin:])}")
            name = stacked_name(names[begin:end])
            matrix = self._packed.matrices[name]
            verify_shape(name, (matrix.num_out, matrix.num_in), (sum(linear.num_outs[begin:end]), linear.num_in))
            if linear.bias != (matrix.bias is not None) or (linear.plain and matrix.scheme.kind != "f"):
                raise CheckpointError(f"{self._packed.path} has another {name} than the model asks for")
            self._parts.take(name)
            matrices.append(self._backend.ops.packed(matrix))
            begin = end
        return matrices[0] if len(matrices) == 1 else self._backend.ops.stacked(stacked_name(names), matrices)

    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        return ByHead.separate(self, name, num_in, num_heads, key_dim, value_dim)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Any, Any]:
        first, last = f"{embedding}.weight", f"{head}.weight"
        # The head was packed as a matrix whether it is tied or not.
        table = self.table(last if tied and not self.has(first) else first, shape)
        return table, self.matrix(Linear([head], shape[1], [shape[0]]))

    def finish(self) -> None:
        """Raise `CheckpointError` if the model did not take all packed tensors."""
        names = self._parts.not_taken()
        if names:
            raise CheckpointError(f"{self._packed.path} has {names[0]}, which the model did not ask for")
