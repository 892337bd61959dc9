"""Makes matrices of the layers of safetensors files: chooses their form, and quantises, fits or casts their rows.

Knows no files and no names of formats. Made by `checkpoint.loader`, called by `checkpoint.quantising`; the backend
reads the rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.checkpoint.tensors import Checkpoint
from headrace.quant import rtn
from headrace.quant.arrays import cast, joined
from headrace.quant.base import QWeight, SplitWeight, Stacked, concatenated
from headrace.quant.fit import Fit, fit_of, fitted
from headrace.quant.placements import Placements
from headrace.quant.schemes import Scheme

if TYPE_CHECKING:
    from headrace.backends.base import Backend


class StoredLayer(NamedTuple):
    """A linear layer, and its bytes in the checkpoint."""

    weight: QWeight
    num_bytes: int = 0


class CheckpointMatrix(Stacked):
    """A `MatrixSource` over mapped tensors. Its rows are quantised, fitted to a kernel, or cast as they are read.

    scheme: of the rows that `slab` gives. fit: converts quantised parts to `scheme`; None for parts that are floats.
    """

    def __init__(
        self, name: str, parts: Sequence[QWeight], checkpoint: Checkpoint, scheme: Scheme, fit: Fit | None
    ) -> None:
        super().__init__(name, parts, scheme)
        self.fit = fit
        self.columns = None if fit is None else fit.columns
        self.permutation = None if fit is None else fit.permutation
        self._checkpoint = checkpoint

    def slab(self, first: int, last: int) -> QWeight:
        self._checkpoint.about_to_read((last - first) * self.num_in * self.parts[0].codes.itemsize)
        pieces = self.pieces(first, last)
        if self.scheme.kind == "f":
            rows = [piece.codes if piece.scales is None else piece.dequantize() for piece in pieces]
            return QWeight(np.ascontiguousarray(joined([cast(row, self.scheme.dtype) for row in rows])))
        if self.fit is not None:
            return concatenated([fitted(piece, self.scheme) for piece in pieces])
        return rtn.quantise(concatenated(pieces).codes, self.scheme, self.name)


class WeightStacks:
    """`quantising.Stacks` of the layers of `checkpoint`. `method`: its quant_method, for the log."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend, method: str) -> None:
        self._checkpoint, self._backend = checkpoint, backend
        self._placements = Placements(method, backend.dtype)

    def forms(self, layers: Sequence[StoredLayer]) -> list[Hashable]:
        if all(layer.weight.scales is None for layer in layers):
            return [None] * len(layers)
        return [self._fit([layer.weight]).form for layer in layers]

    def piece(self, layer: StoredLayer, first: int, last: int, transposed: bool) -> StoredLayer:
        piece = layer.weight.rows(first, last)
        # An order of inputs, or outliers, belong to the whole layer; the kernels for heads take neither.
        if piece.scales is not None and (transposed or piece.permutation is not None or isinstance(piece, SplitWeight)):
            piece = QWeight(piece.dequantize())
        return StoredLayer(QWeight(piece.codes.T) if transposed else piece)

    def source(self, name: str, layers: list[StoredLayer], scheme: Scheme | None, plain: bool) -> CheckpointMatrix:
        weights, fit = [layer.weight for layer in layers], None
        if any(weight.scales is not None for weight in weights):
            fit = Fit(None, "this layer is kept plain") if plain else self._fit(weights)
            scheme = fit.scheme
        scheme = scheme or Scheme("f", dtype=self._backend.dtype)
        source = CheckpointMatrix(name, weights, self._checkpoint, scheme, fit)
        if fit is not None:
            self._placements.add(source, fit, sum(layer.num_bytes for layer in layers))
        return source

    def log(self) -> None:
        self._placements.log()

    def _fit(self, weights: list[QWeight]) -> Fit:
        return fit_of(weights, self._backend.schemes, permutes=self._backend.mixes)
