"""What the readers of safetensors and GGUF files share: stacking, quantising on the way, and filling a packed file.

A subclass reads one layer, one bias and one small tensor at a time; `QuantisingReader` makes the backend's matrices of
them. Knows no file formats. Called by `checkpoint.loader` and `checkpoint.gguf_source`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.mapped import stacked_name
from headrace.checkpoint.packing import mixes
from headrace.checkpoint.reader import Progress, Reader
from headrace.models.weights import ByHead, Cut
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.arrays import floats
from headrace.quant.schemes import NAMES, Quantization, Scheme, parse

if TYPE_CHECKING:
    from headrace.backends.base import Array, Backend, Matrix
    from headrace.checkpoint.packed import PackedWriter
    from headrace.checkpoint.packing import Packable
    from headrace.quant.base import MatrixSource

MAX_SHOWN = 5

P = TypeVar("P")
"""One linear layer as the subclass reads it."""


class QuantisingReader(Reader, Generic[P]):
    """`Weights` that may be quantised on the way.

    Args:
        owner: what error messages call the file.
        names: of its tensors.
        on_tensor: reports progress.
        quantization: for the linear layers and the head; None leaves floats in the backend's dtype. Raises
            `RequestError` if the backend has no kernels for it.
        writer: gets everything in the form in which it can be mapped at the next start; the backend's matrices must be
            `checkpoint.packing.Packable`.
    """

    def __init__(
        self,
        owner: str,
        names: Iterable[str],
        backend: Backend,
        on_tensor: Progress | None,
        quantization: Quantization | None,
        writer: PackedWriter | None,
    ) -> None:
        super().__init__(names, on_tensor)
        self._owner = owner
        self._backend = backend
        self._writer = writer
        self._quantization = quantization
        if quantization is not None and not _schemes(quantization) <= backend.schemes:
            usable = [name for name in NAMES if _schemes(parse(name)) <= backend.schemes]
            raise RequestError(
                "quantization", quantization.name, f"one of {', '.join(usable)} on backend {backend.name}"
            )

    def constant(self, values: Array) -> Array:
        return self._backend.constant(values)

    def constant_table(self, values: Array) -> Array:
        return self._backend.table(values)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._backend.constant(self._kept(name, shape), is_weight=True)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.array(floats(self._kept(name, shape)), np.float32)

    def _kept(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A small tensor, which the packed file keeps too."""
        values = self._small(name, shape)
        if self._writer is not None:
            self._writer.tensor(name, floats(values))
        return values

    def linear(
        self,
        names: Sequence[str],
        num_in: int,
        num_outs: Sequence[int],
        *,
        bias: bool = False,
        transposed: bool = False,
        plain: bool = False,
        orders: Sequence[NDArray[np.int64] | None] = (),
        cut: Cut = None,
    ) -> Matrix:
        orders = orders or [None] * len(names)
        layers = [self._layer(name, num_out, num_in, transposed) for name, num_out in zip(names, num_outs, strict=True)]
        layers = [layer if o is None else self._ordered(layer, o) for layer, o in zip(layers, orders, strict=True)]
        biases = self._biases(names, num_outs, orders) if bias else None
        return self._matrix(names, layers, self._scheme(plain), biases, plain)

    def by_head(self, name: str, num_in: int, num_heads: int, turned: int, straight: int) -> ByHead:
        """As `Weights.by_head`. What is transposed can not keep codes, whose scales go along the other side."""
        each = turned + straight
        layer = self._layer(name, num_heads * each, num_in, False)
        matrices = ByHead([], [])
        for head in range(num_heads):
            first, middle, last = head * each, head * each + turned, (head + 1) * each
            pieces = self._piece(layer, first, middle, True), self._piece(layer, middle, last, False)
            for part, of_head, piece in zip(matrices, ByHead.names(name, head), pieces, strict=True):
                part.append(self._matrix([of_head], [piece], self._scheme(), None, plain=False))
        return matrices

    def finish(self) -> None:
        """Raise `CheckpointError` if the file has tensors that the model did not take and that are not spare."""
        names = [name for name in self._not_taken() if not self._is_spare(name)]
        if names:
            listing = ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
            raise CheckpointError(f"{len(names)} tensors of {self._owner} have no place in the model: {listing}")

    @abstractmethod
    def _layer(self, name: str, num_out: int, num_in: int, transposed: bool) -> P:
        """The weight of one linear layer [num_out, num_in]."""
        ...

    @abstractmethod
    def _piece(self, layer: P, first: int, last: int, transposed: bool) -> P:
        """Outputs first ... last - 1 of the layer; transposed: as floats [num_in, last - first]."""
        ...

    @abstractmethod
    def _ordered(self, layer: P, order: NDArray[np.int64]) -> P:
        """The layer with its outputs in another order: `order` has for each its place in `layer`."""
        ...

    def _ordered_bias(self, bias: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
        return bias[order]

    @abstractmethod
    def _bias(self, name: str, size: int) -> NDArray[Any]:
        """The bias [size] of the linear layer `name`."""
        ...

    @abstractmethod
    def _small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]: ...

    @abstractmethod
    def _matrix(
        self, names: Sequence[str], layers: list[P], scheme: Scheme | None, bias: NDArray[Any] | None, plain: bool
    ) -> Matrix:
        """One matrix of stacked layers. scheme: what floats become; None for the backend's dtype."""
        ...

    def _runs(
        self,
        names: Sequence[str],
        layers: list[P],
        num_outs: Sequence[int],
        forms: Sequence[Hashable],
        scheme: Scheme | None,
        bias: NDArray[Any] | None,
    ) -> Matrix | None:
        """One matrix of several, each of neighbours of one of `forms`; None if all have one form, or if the backend can
        not hold several."""
        ends = [i for i in range(1, len(forms) + 1) if i == len(forms) or forms[i] != forms[i - 1]]
        backend = self._backend
        if len(ends) == 1 or not mixes(backend):
            return None
        matrices, row = [], 0
        for first, last in zip([0, *ends], ends, strict=False):
            end = row + sum(num_outs[first:last])
            part = None if bias is None else bias[row:end]
            matrices.append(self._matrix(names[first:last], layers[first:last], scheme, part, plain=False))
            row = end
        stack: Matrix = backend.ops.stacked(stacked_name(names), matrices)
        return stack

    def _is_spare(self, name: str) -> bool:
        """Whether the model may leave the tensor `name`."""
        return False

    def _scheme(self, plain: bool = False) -> Scheme | None:
        return None if plain or self._quantization is None else self._quantization.layer

    def _head_scheme(self) -> Scheme | None:
        return None if self._quantization is None else self._quantization.head

    def _biases(
        self, names: Sequence[str], num_outs: Sequence[int], orders: Sequence[NDArray[np.int64] | None]
    ) -> NDArray[Any]:
        parts = [floats(self._bias(name, num_out)) for name, num_out in zip(names, num_outs, strict=True)]
        return np.concatenate(
            [part if o is None else self._ordered_bias(part, o) for part, o in zip(parts, orders, strict=True)]
        )

    def _make(self, source: MatrixSource, bias: NDArray[Any] | None) -> Matrix:
        """The backend's matrix of `source`, which is also written to the packed file."""
        constant = None if bias is None else self._backend.constant(bias, is_weight=True)
        matrix: Matrix = self._backend.ops.matrix(source, constant)
        if self._writer is not None and source.columns is not None:
            self._writer.give_up(f"{source.name} has outliers, which a packed file has no place for")
        elif self._writer is not None:
            self._writer.matrix(source.name, cast("Packable", matrix), bias)
        return matrix


def _schemes(quantization: Quantization) -> set[Scheme]:
    return {quantization.layer, quantization.head}
