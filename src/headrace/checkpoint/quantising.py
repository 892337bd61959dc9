"""Reads the weights of a checkpoint for one model: the model's request goes in, the backend's matrix comes out.

`QuantisingReader` stacks layers, quantises floats on the way, and fills a packed file. It has two parts that know the
kind of checkpoint: a `Format`, which reads layers as they are stored, and `Stacks`, which turns the rows of several
layers into a backend's form. Neither of them knows the reader. Made by `checkpoint.loader` and
`checkpoint.gguf_source`; called by model files, as `models.weights.Weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.mapped import stacked_name
from headrace.checkpoint.packing import mixes
from headrace.checkpoint.reader import Parts, Progress, Reader
from headrace.checkpoint.strays import listing, not_harmless
from headrace.models.weights import ByHead, Linear
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.arrays import floats
from headrace.quant.schemes import NAMES, Quantization, Scheme, parse

if TYPE_CHECKING:
    from headrace.backends.base import Array, Backend, Matrix
    from headrace.checkpoint.packed import PackedWriter
    from headrace.checkpoint.packing import Packable
    from headrace.quant.base import MatrixSource

L = TypeVar("L")
"""One linear layer as it is stored."""


class Format(Protocol[L]):
    """A kind of checkpoint. Tensors that it reads count as taken."""

    owner: str
    """The name of the checkpoint in error messages."""
    parts: Parts
    """Its tensors."""

    def layers(self, linear: Linear) -> list[L]:
        """Return the weights of the layers, their outputs in the model's order."""
        ...

    def bias(self, linear: Linear) -> NDArray[np.float32]:
        """Return the biases of the layers, one after the other."""
        ...

    def small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a norm, or another small tensor of floats."""
        ...

    def table(self, name: str, shape: tuple[int, int]) -> tuple[NDArray[Any], bool]:
        """Return an embedding table as `Backend.table` takes it, and whether it was computed: else it is mapped."""
        ...

    def ends(self, embedding: str, head: str, tied: bool) -> tuple[str, bool]:
        """Return the name of the table's tensor, and whether it is the head too. `tied`: the config's flag."""
        ...

    def tied_head(self, name: str, shape: tuple[int, int]) -> L:
        """Return the tensor of a table as the layer of the head."""
        ...

    def is_spare(self, name: str) -> bool:
        """Return whether the model may leave the tensor `name` unread."""
        ...

    def is_empty(self, name: str) -> bool:
        """Return whether the tensor `name` has no elements."""
        ...

    def release(self) -> None:
        """Take the files' pages out of memory."""
        ...


class Stacks(Protocol[L]):
    """Makes matrices of layers, for one backend."""

    def forms(self, layers: Sequence[L]) -> Sequence[Hashable]:
        """Return the form of each layer. Neighbours of one form may be one matrix."""
        ...

    def piece(self, layer: L, first: int, last: int, transposed: bool) -> L:
        """Return outputs first ... last - 1 of the layer; transposed: as floats [num_in, last - first]."""
        ...

    def source(self, name: str, layers: list[L], scheme: Scheme | None, plain: bool) -> MatrixSource:
        """Return the rows of the layers. scheme: for quantising floats; None for the backend's dtype. plain: nothing is
        quantised."""
        ...

    def log(self) -> None:
        """Log the forms of the matrices."""
        ...


class Loading(NamedTuple):
    """How weights are loaded.

    quantization: of the linear layers and the head; None leaves floats in the backend's dtype.
    writer: writes all weights in the form in which they can be mapped at the next start; the backend's matrices must be
    `checkpoint.packing.Packable`.
    """

    on_tensor: Progress | None = None
    quantization: Quantization | None = None
    writer: PackedWriter | None = None


class QuantisingReader(Reader, Generic[L]):
    """The checkpoint of a `Format` as `Weights`, for one model."""

    def __init__(self, layout: Format[L], stacks: Stacks[L], backend: Backend, loading: Loading) -> None:
        super().__init__(layout.parts.names, layout.parts)
        self._format, self._stacks, self._backend = layout, stacks, backend
        self._writer, self._quantization = loading.writer, loading.quantization

    def constant(self, values: Array) -> Array:
        return self._backend.constant(values)

    def constant_table(self, values: Array) -> Array:
        return self._backend.table(values)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._backend.constant(self._small(name, shape), is_weight=True)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.array(floats(self._small(name, shape)), np.float32)

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        values, is_computed = self._format.table(name, shape)
        if self._writer is not None and is_computed:
            self._writer.table(name, values)
        return self._backend.table(values)

    def matrix(self, linear: Linear) -> Matrix:
        layers = self._format.layers(linear)
        bias = self._format.bias(linear) if linear.bias else None
        return self._stacked(linear.names, layers, self._scheme(linear.plain), bias, linear.plain)

    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        """As `Weights.by_head`. Transposed parts cannot keep codes, whose scales go along the other side."""
        if self.has(ByHead.names(name, 0)[0] + ".weight"):
            # GGUF files of today have keys and values in separate tensors, with the keys transposed.
            return ByHead.separate(self, name, num_in, num_heads, key_dim, value_dim)
        each = key_dim + value_dim
        (layer,) = self._format.layers(Linear([name], num_in, [num_heads * each]))
        matrices = ByHead([], [])
        for head in range(num_heads):
            first, middle, last = head * each, head * each + key_dim, (head + 1) * each
            spans = (first, middle, True), (middle, last, False)
            for part, of_head, span in zip(matrices, ByHead.names(name, head), spans, strict=True):
                part.append(self._stacked([of_head], [self._stacks.piece(layer, *span)], self._scheme()))
        return matrices

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        name, tied = self._format.ends(embedding, head, tied)
        table, scheme = self.table(name, shape), None if self._quantization is None else self._quantization.head
        if tied:
            return table, self._stacked([head], [self._format.tied_head(name, shape)], scheme)
        return table, self._stacked([head], self._format.layers(Linear([head], shape[1], shape[:1])), scheme)

    def finish(self) -> None:
        """Raise `CheckpointError` if the file has tensors that the model did not take and that are not spare."""
        owner = self._format.owner
        names = [name for name in self._parts.not_taken() if not self._format.is_spare(name)]
        if names := not_harmless(names, self._format.is_empty, owner):
            raise CheckpointError(f"{len(names)} tensors of {owner} have no place in the model: {listing(names)}")
        self._stacks.log()
        self._format.release()

    def _small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a small tensor, and add it to the packed file."""
        values = self._format.small(name, shape)
        if self._writer is not None:
            self._writer.tensor(name, floats(values))
        return values

    def _scheme(self, plain: bool = False) -> Scheme | None:
        return None if plain or self._quantization is None else self._quantization.layer

    def _stacked(
        self,
        names: Sequence[str],
        layers: list[L],
        scheme: Scheme | None,
        bias: NDArray[np.float32] | None = None,
        plain: bool = False,
    ) -> Matrix:
        """Return one matrix of stacked layers; if the backend can hold such, one made of several matrices, each of
        neighbouring layers of one form. scheme: for quantising floats; None for the backend's dtype."""
        backend = self._backend
        if plain or len(layers) == 1 or not mixes(backend):
            return self._make(self._stacks.source(stacked_name(names), layers, scheme, plain), bias)
        forms = self._stacks.forms(layers)
        ends = [i for i in range(1, len(forms) + 1) if i == len(forms) or forms[i] != forms[i - 1]]
        matrices, row = [], 0
        for first, last in itertools.pairwise([0, *ends]):
            source = self._stacks.source(stacked_name(names[first:last]), layers[first:last], scheme, plain)
            end = row + source.num_out
            matrices.append(self._make(source, None if bias is None else bias[row:end]))
            row = end
        if len(matrices) == 1:
            return matrices[0]
        stack: Matrix = backend.ops.stacked(stacked_name(names), matrices)
        return stack

    def _make(self, source: MatrixSource, bias: NDArray[np.float32] | None) -> Matrix:
        """Return the backend's matrix of `source`, and add it to the packed file."""
        constant = None if bias is None else self._backend.constant(bias, is_weight=True)
        matrix: Matrix = self._backend.ops.matrix(source, constant)
        if self._writer is not None and source.columns is not None:
            self._writer.give_up(f"{source.name} has outliers, which a packed file has no place for")
        elif self._writer is not None:
            self._writer.matrix(source.name, cast("Packable", matrix), bias)
        return matrix


def verify_kernels(quantization: Quantization | None, backend: Backend) -> None:
    """Raise `RequestError` if the backend has no kernels for the quantization."""
    if quantization is not None and not _schemes(quantization) <= backend.schemes:
        usable = [name for name in NAMES if _schemes(parse(name)) <= backend.schemes]
        raise RequestError("quantization", quantization.name, f"one of {', '.join(usable)} on backend {backend.name}")


def _schemes(quantization: Quantization) -> set[Scheme]:
    return {quantization.layer, quantization.head}
