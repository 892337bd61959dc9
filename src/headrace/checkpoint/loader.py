"""Reads a directory of safetensors files: mapped, one layer's tensors at a time.

Nothing in the directory is executed: pickled weights (.bin, .pt, .pth, .ckpt) are refused (S-03), `auto_map` is never
followed (S-04), and an index may name files of the directory only (S-28); see `checkpoint.mapped`. `SafetensorsWeights`
may quantise on the way. Knows no requests. Called by `engine.library.load`, `drafters.files` and `quantize`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.mapped import verify_shape
from headrace.checkpoint.quantising import Loading, QuantisingReader, verify_kernels
from headrace.checkpoint.reader import Parts, Progress
from headrace.checkpoint.stacks import StoredLayer, WeightStacks
from headrace.checkpoint.tensors import Checkpoint, LayerTensors
from headrace.models.weights import Linear, SplitWeights
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, bits_of, floats, type_name
from headrace.quant.base import QWeight, find_format

if TYPE_CHECKING:
    from headrace.backends.base import Backend, Matrix

logger = logging.getLogger(__name__)


class SafetensorsFormat:
    """`quantising.Format` of a directory of safetensors files.

    Args:
        config: config.json's quantization_config.
        spare: matches the names of tensors that the model may leave unread.
    """

    owner = "the checkpoint"

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: dict[str, Any] | None = None,
        on_tensor: Progress | None = None,
        spare: re.Pattern[str] | None = None,
    ) -> None:
        self.parts = Parts(checkpoint.names, on_tensor)
        self._checkpoint, self._spare = checkpoint, spare
        self._format, self._config = find_format(config), config or {}
        self._tensors = LayerTensors(checkpoint, self.parts)
        self._num_bytes: Counter[str] = Counter()

    def layers(self, linear: Linear) -> list[StoredLayer]:
        layers = []
        for name, num_out, order in linear.layers():
            layer = self._layer(name, (num_out, linear.num_in), linear.transposed, linear.by_shape)
            layers.append(layer if order is None else layer._replace(weight=layer.weight.ordered(order)))
        return layers

    def bias(self, linear: Linear) -> NDArray[np.float32]:
        biases = []
        for name, num_out, order in linear.layers():
            bias = floats(self.small(f"{name}.bias", (num_out,)))
            biases.append(bias if order is None else bias[order])
        return np.concatenate(biases)

    def small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        tensor = self._tensors(name)
        verify_shape(name, tensor.shape, shape)
        if type_name(tensor) not in PLAIN:
            raise CheckpointError(f"{name} is stored as {type_name(tensor)}, expected plain floats")
        return tensor

    def table(self, name: str, shape: tuple[int, int]) -> tuple[NDArray[Any], bool]:
        weight = self._table(name, shape)
        return (weight.codes, False) if weight.scales is None else (weight.dequantize(), True)

    def _table(self, name: str, shape: tuple[int, int]) -> QWeight:
        """The table `name` (with ".weight"): floats, or codes as a linear layer has them."""
        if self._tensors.has(name) and type_name(self._tensors(name)) in PLAIN:
            return QWeight(self.small(name, shape))
        return self._layer(name.removesuffix(".weight"), shape, False).weight

    def ends(self, embedding: str, head: str, tied: bool) -> tuple[str, bool]:
        """As `Format.ends`. Tied weights are stored once, under either name, or twice."""
        first, last, has = f"{embedding}.weight", f"{head}.weight", self._tensors.has
        parts = {name for name in self.parts.names if name.startswith(f"{head}.")} - {f"{head}.bias"}
        if tied and not has(last) and parts:
            logger.warning("tie_word_embeddings is true, but the checkpoint has a quantised %s: it is used", head)
            return first, False
        if tied and has(first) and has(last) and not self._have_same_bits(first, last):
            # A fine-tune made them different and kept the flag; transformers reads them the same way.
            logger.warning("tie_word_embeddings is true, but %s and %s differ: both are used", first, last)
            tied = False
        return last if tied and not has(first) and has(last) else first, tied

    def tied_head(self, name: str, shape: tuple[int, int]) -> StoredLayer:
        return StoredLayer(self._table(name, shape))

    def is_spare(self, name: str) -> bool:
        if self._spare is not None and self._spare.fullmatch(name):
            return True
        if self._format.SPARE.fullmatch(name):
            return True
        # Some writers of quantised layers store biases of zeros where the model has none.
        is_bias = bool(self._config) and name.endswith(".bias")
        return is_bias and not floats(self._checkpoint.array(name)).any()

    def is_empty(self, name: str) -> bool:
        return 0 in self._checkpoint.entry(name).shape

    def release(self) -> None:
        self._checkpoint.release()

    def _layer(self, name: str, shape: tuple[int, int], transposed: bool, by_shape: bool = False) -> StoredLayer:
        tensors = LayerTensors(self._checkpoint, self.parts)
        weight = self._format.read(tensors, name, self._config)
        transposed = transposed or (by_shape and weight.shape != shape)
        if transposed and weight.scales is None:  # codes are [out, in] in every format
            verify_shape(f"{name}.weight", weight.shape, (shape[1], shape[0]))
            weight = QWeight(weight.codes.T)
        verify_shape(f"{name}.weight", weight.shape, shape)
        self._num_bytes[name] += tensors.num_bytes
        return StoredLayer(weight, self._num_bytes[name])

    def _have_same_bits(self, first: str, second: str) -> bool:
        return np.array_equal(bits_of(self._tensors(first)), bits_of(self._tensors(second)))


class SafetensorsWeights(QuantisingReader[StoredLayer], SplitWeights):
    """A directory of safetensors files as `models.weights.Weights`, for one model.

    quantization_config: of config.json. A checkpoint that has one cannot be quantised again. spare: as in
    `SafetensorsFormat`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        quantization_config: dict[str, Any] | None = None,
        loading: Loading = Loading(),
        spare: re.Pattern[str] | None = None,
    ) -> None:
        layout = SafetensorsFormat(checkpoint, quantization_config, loading.on_tensor, spare)
        method = (quantization_config or {}).get("quant_method")
        if loading.quantization is not None and quantization_config is not None:
            raise CheckpointError(
                f"config.json has a quantization_config ({method}): these weights are quantised already, load them "
                f"without quantization {loading.quantization.name!r}"
            )
        verify_kernels(loading.quantization, backend)
        super().__init__(layout, WeightStacks(checkpoint, backend, str(method)), backend, loading)

    def columns(self, linear: Linear, first: int, width: int) -> Matrix:
        layers = []
        for layer, _ in self._format.layers(linear._replace(num_in=width)):
            numbers = layer.codes if layer.scales is None else layer.dequantize()
            layers.append(StoredLayer(QWeight(numbers[:, first : first + linear.num_in])))
        bias = self._format.bias(linear) if linear.bias else None
        return self._stacked(linear.names, layers, self._scheme(), bias)
