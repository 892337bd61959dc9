"""Reads a directory of safetensors files: mapped, one layer's tensors at a time.

Nothing in the directory is executed: pickled weights (.bin, .pt, .pth, .ckpt) are refused (S-03), `auto_map` is never
followed (S-04), and an index may name files of the directory only (S-28); see `checkpoint.mapped`. `SafetensorsWeights`
may quantise on the way. Knows no requests. Called by `engine.library.load`, `drafters.files` and `quantize`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.mapped import MappedCheckpoint, stacked_name, verify_shape
from headrace.checkpoint.quantising import QuantisingReader
from headrace.checkpoint.reader import Progress, ResidentBytes
from headrace.models.weights import SplitWeights
from headrace.protocol.errors import CheckpointError
from headrace.quant import rtn
from headrace.quant.arrays import PLAIN, bits_of, cast, floats, joined, type_name
from headrace.quant.base import QWeight, SplitWeight, Stacked, concatenated, find_format
from headrace.quant.fit import Fit, fit_of, fitted
from headrace.quant.placements import Placements
from headrace.quant.schemes import Quantization, Scheme

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.backends.base import Array, Backend, Matrix
    from headrace.checkpoint.packed import PackedWriter

logger = logging.getLogger(__name__)

# Buffers that old checkpoints stored and no model needs.
IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")


class Checkpoint(MappedCheckpoint):
    """The tensors of a directory by name, of whose files little is in memory at a time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._resident = ResidentBytes()

    def about_to_read(self, num_bytes: int) -> None:
        """Release pages now and then, so that the files are never in memory as a whole."""
        if self._resident.exceeded_by(num_bytes):
            self.release()


class CheckpointMatrix(Stacked):
    """A `MatrixSource` over mapped tensors. Its rows are quantised, fitted to a kernel, or cast as they are read.

    scheme: of the rows that `slab` gives. fit: how quantised parts become `scheme`; None for parts that are floats.
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


class SafetensorsWeights(QuantisingReader[QWeight], SplitWeights):
    """A directory of safetensors files as `models.weights.Weights`, for one model.

    Args:
        quantization_config: of config.json. A checkpoint that has one can not be quantised again.
        spare: matches the names of tensors that the model may leave.
        The others are those of `QuantisingReader`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        quantization_config: dict[str, Any] | None = None,
        on_tensor: Progress | None = None,
        quantization: Quantization | None = None,
        writer: PackedWriter | None = None,
        spare: re.Pattern[str] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._format = find_format(quantization_config)
        self._quantization_config = quantization_config or {}
        self._placements = Placements(str(self._quantization_config.get("quant_method")), backend.dtype)
        self._layer_bytes: Counter[str] = Counter()
        self._spare = spare
        if quantization is not None and quantization_config is not None:
            raise CheckpointError(
                f"config.json has a quantization_config ({quantization_config.get('quant_method')}): these weights are "
                f"quantised already, load them without quantization {quantization.name!r}"
            )
        super().__init__("the checkpoint", checkpoint.names, backend, on_tensor, quantization, writer)

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        return self._backend.table(self._small(name, shape))

    def columns(
        self, names: Sequence[str], num_in: int, num_outs: Sequence[int], *, first: int, width: int, bias: bool = False
    ) -> Matrix:
        layers = []
        for name, num_out in zip(names, num_outs, strict=True):
            layer = self._layer(name, num_out, width, transposed=False)
            numbers = layer.codes if layer.scales is None else layer.dequantize()
            layers.append(QWeight(numbers[:, first : first + num_in]))
        biases = self._biases(names, num_outs, [None] * len(names)) if bias else None
        return self._matrix(names, layers, self._scheme(), biases, plain=False)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        """As `Weights.ends`. Tied weights are stored once, under either name, or twice."""
        first, last = f"{embedding}.weight", f"{head}.weight"
        if tied and self.has(first) and self.has(last) and not self._have_same_bits(first, last):
            # A fine-tune moved them apart and kept the flag; transformers reads it the same way.
            logger.warning("tie_word_embeddings is true, but %s and %s differ: both are used", first, last)
            tied = False
        if tied and not self.has(first) and self.has(last):
            first = last
        table = self.table(first, shape)
        if tied:
            layer = QWeight(self._small(first, shape))
        else:
            layer = self._layer(head, *shape, transposed=False)
        return table, self._matrix([head], [layer], self._head_scheme(), None, plain=False)

    def _have_same_bits(self, first: str, second: str) -> bool:
        return np.array_equal(bits_of(self._mapped(first)), bits_of(self._mapped(second)))

    def notes(self, name: str) -> Mapping[str, str]:
        """The texts that the metadata of the tensor's file have."""
        return self._checkpoint.file(name).metadata

    def finish(self) -> None:
        super().finish()
        self._placements.log()
        self._checkpoint.release()

    def _is_spare(self, name: str) -> bool:
        if self._spare is not None and self._spare.fullmatch(name):
            return True
        if IGNORED.fullmatch(name) or self._format.SPARE.fullmatch(name):
            return True
        # Some writers of quantised layers store biases of zeros where the model has none.
        is_bias = bool(self._quantization_config) and name.endswith(".bias")
        return is_bias and not floats(self._checkpoint.array(name)).any()

    def _layer(self, name: str, num_out: int, num_in: int, transposed: bool) -> QWeight:
        layer = self._format.read(_LayerTensors(self, name), name, self._quantization_config)
        if transposed and layer.scales is None:  # codes are [out, in] in every format
            verify_shape(f"{name}.weight", layer.shape, (num_in, num_out))
            layer = QWeight(layer.codes.T)
        verify_shape(f"{name}.weight", layer.shape, (num_out, num_in))
        return layer

    def _piece(self, layer: QWeight, first: int, last: int, transposed: bool) -> QWeight:
        piece = layer.rows(first, last)
        # An order of the inputs and outliers are those of the whole layer, which kernels for heads do not have.
        if piece.scales is not None and (transposed or piece.permutation is not None or isinstance(piece, SplitWeight)):
            piece = QWeight(piece.dequantize())
        return QWeight(piece.codes.T) if transposed else piece

    def _ordered(self, layer: QWeight, order: NDArray[np.int64]) -> QWeight:
        return layer.ordered(order)

    def _matrix(
        self, names: Sequence[str], layers: list[QWeight], scheme: Scheme | None, bias: NDArray[Any] | None, plain: bool
    ) -> Matrix:
        fit = None
        if any(layer.scales is not None for layer in layers):
            if not plain and len(layers) > 1:
                forms = [self._fit([layer]).form for layer in layers]
                num_outs = [layer.shape[0] for layer in layers]
                if (matrix := self._runs(names, layers, num_outs, forms, scheme, bias)) is not None:
                    return matrix
            fit = Fit(None, "this layer is kept plain") if plain else self._fit(layers)
            scheme = fit.scheme
        scheme = scheme or Scheme("f", dtype=self._backend.dtype)
        source = CheckpointMatrix(stacked_name(names), layers, self._checkpoint, scheme, fit)
        if fit is not None:
            self._placements.add(source, fit, sum(self._layer_bytes[name] for name in names))
        return self._make(source, bias)

    def _fit(self, layers: list[QWeight]) -> Fit:
        return fit_of(layers, self._backend.schemes, permutes=self._backend.mixes)

    def _bias(self, name: str, size: int) -> NDArray[Any]:
        return self._small(f"{name}.bias", (size,))

    def _small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return self._floats(name, shape, self._mapped(name))

    def _floats(self, name: str, shape: tuple[int, ...], tensor: NDArray[Any]) -> NDArray[Any]:
        verify_shape(name, tensor.shape, shape)
        if type_name(tensor) not in PLAIN:
            raise CheckpointError(f"{name} is stored as {type_name(tensor)}, expected plain floats")
        return tensor

    def _mapped(self, name: str, layer: str = "") -> NDArray[Any]:
        """Take the tensor `name`. layer: of which its bytes count."""
        if name not in self._names:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        if self._take(name) and layer:
            entry = self._checkpoint.entry(name)
            self._layer_bytes[layer] += entry.end - entry.begin
        return self._checkpoint.array(name)


class _LayerTensors:
    """`quant.base.Tensors` of one layer of a `SafetensorsWeights`."""

    def __init__(self, weights: SafetensorsWeights, layer: str) -> None:
        self._weights, self._layer = weights, layer

    def __call__(self, name: str) -> NDArray[Any]:
        return self._weights._mapped(name, self._layer)

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def notes(self, name: str) -> Mapping[str, str]:
        return self._weights.notes(name)
