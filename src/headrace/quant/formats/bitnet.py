"""BitNet's checkpoints (Ma et al. 2024) as transformers writes them: ternary weights, a scale for each matrix.

`weight` uint8 [out / 4, in]: row r has the codes of the outputs r, r + out / 4, ..., the first in its lowest two bits;
weight = code - 1. `weight_scale` [1] divides the product (linear_class "bitlinear", the default) or multiplies it
("autobitlinear", whose ternary weights may also be stored as floats). With quantization_mode "online" the weights are
floats that are rounded to ternary numbers times the mean of their sizes whenever they are used: here once, at the load.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, floats, type_name
from headrace.quant.base import QWeight, Tensors
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import checked, one_scale, plain_weight

SPARE = re.compile(r"(?!)")
HEAD = ("lm_head",)
"""Layers that are not ternary where the config lists none."""
LEAST_MEAN = np.float32(1e-5)
CODES_PER_BYTE = 4


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's ternary weights as codes 1 to 3 around 2; plain floats if the config leaves it alone."""
    listed = config.get("modules_to_not_convert")
    if left_alone(name, HEAD if listed is None else names_listed(config, "modules_to_not_convert")):
        return plain_weight(tensors, name)
    scaled = _choice(config, "linear_class", "bitlinear", "autobitlinear") == "autobitlinear"
    online = scaled and _choice(config, "quantization_mode", "offline", "online") == "online"
    if config.get("use_rms_norm"):
        raise CheckpointError("quantization_config: use_rms_norm is true: a norm before each layer is not supported")
    weight = checked(tensors, f"{name}.weight", (None, None), "uint8", *(PLAIN if scaled else ()))
    if online:
        return _rounded(floats(weight), f"{name}.weight")
    scale = one_scale(tensors, f"{name}.weight_scale")
    codes = _codes(weight, f"{name}.weight") if type_name(weight) == "uint8" else _ternary(weight, f"{name}.weight")
    return _weight(codes, scale if scaled else np.float32(1) / scale)


def activations(config: dict[str, Any]) -> str:
    return "int8 by row"


def _choice(config: dict[str, Any], key: str, *allowed: str) -> str:
    value = config.get(key) or allowed[0]
    if value not in allowed:
        raise CheckpointError(f"quantization_config: {key} is {value!r:.80}, expected {' or '.join(allowed)}")
    return str(value)


def _codes(packed: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Codes 1 to 3 [out, in] out of bytes [out / 4, in]."""
    if (packed & packed >> 1 & 0x55).any():
        raise CheckpointError(f"{name}, shape {list(packed.shape)}, has the code 3, expected 0 to 2 (-1, 0 and 1)")
    codes: NDArray[np.uint8] = np.concatenate([(packed >> 2 * i & 3) + np.uint8(1) for i in range(CODES_PER_BYTE)])
    return codes


def _ternary(weight: NDArray[Any], name: str) -> NDArray[np.uint8]:
    numbers: NDArray[np.float32] = floats(weight)
    if not np.isin(numbers, (-1, 0, 1)).all():
        raise CheckpointError(f"{name}, shape {list(weight.shape)}, has weights beside -1, 0 and 1")
    codes: NDArray[np.uint8] = (numbers + 2).astype(np.uint8)
    return codes


def _rounded(weight: NDArray[np.float32], name: str) -> QWeight:
    """Floats as ternary codes, as the training rounds them."""
    mean = max(np.float32(np.abs(weight).mean(dtype=np.float64)), LEAST_MEAN)
    if not np.isfinite(mean):
        raise CheckpointError(f"{name}, shape {list(weight.shape)}, has a weight that is not finite")
    codes = np.clip(np.rint(weight * (1 / mean)), -1, 1) + 2
    return _weight(codes.astype(np.uint8), np.full((1, 1), mean, np.float32))


def _weight(codes: NDArray[np.uint8], scale: NDArray[np.float32]) -> QWeight:
    scales = np.broadcast_to(scale, (len(codes), 1))
    return QWeight(codes, scales, np.broadcast_to(np.float32(2), scales.shape), group=codes.shape[1], bits=2)
