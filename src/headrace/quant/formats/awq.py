"""AWQ checkpoints (Lin et al. 2024), in AutoAWQ's "gemm" layout, of 4 bits.

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], packed along the outputs; the eight codes of a word
belong to outputs 0, 2, 4, 6, 1, 3, 5, 7. `scales` [groups, out]. weight = (code - zero) * scale.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight, Tensors
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import checked, good_scales, group_of, plain_weight, unpacked, whole

SPARE = re.compile(r"(?!)")
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of the codes of outputs 0 ... 7."""


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; `<name>.weight` if modules_to_not_convert names it, or if there is no `qweight`."""
    # First, so that a config that makes no sense is refused even if all weights are plain.
    bits = whole(config, "bits", config.get("w_bit"))
    group = group_of(config, "group_size", config.get("q_group_size"))
    layout = config.get("version", "gemm")
    if bits != 4:
        raise CheckpointError(f"config.json: quantization_config.bits is {bits}, expected 4")
    if str(layout).lower() != "gemm":
        raise CheckpointError(f"config.json: quantization_config.version is {layout!r:.80}, expected gemm")
    alone = left_alone(name, names_listed(config, "modules_to_not_convert"))
    if alone or (not tensors.has(f"{name}.qweight") and tensors.has(f"{name}.weight")):
        return plain_weight(tensors, name)
    packed = checked(tensors, f"{name}.qweight", (None, None), "int32")
    num_in, num_words = packed.shape
    group = num_in if group == -1 else group
    num_groups = -(-num_in // group)
    scales = checked(tensors, f"{name}.scales", (num_groups, 8 * num_words))
    if config.get("zero_point", True):
        zeros = _in_order(checked(tensors, f"{name}.qzeros", (num_groups, num_words), "int32"))
    else:
        if tensors.has(f"{name}.qzeros"):
            tensors(f"{name}.qzeros")
        zeros = np.full((num_groups, 8 * num_words), 8, np.uint8)
    parts = np.ascontiguousarray(good_scales(scales, f"{name}.scales").T), np.ascontiguousarray(zeros.T, np.float32)
    return QWeight(np.ascontiguousarray(_in_order(packed).T), *parts, group=group, bits=bits)


def _in_order(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """int32 [rows, n] -> uint8 [rows, 8 * n], outputs in the model's order."""
    stored = unpacked(words, 4, 8 * words.shape[1]).reshape(*words.shape, 8)
    return stored[:, :, list(PLACES)].reshape(len(words), -1)
