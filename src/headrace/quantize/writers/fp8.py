"""8-bit floats as transformers' and DeepSeek-V3's checkpoints have them and `quant.fp8` reads them: `weight` float8 and
`weight_scale_inv`, one number or one for each output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import fp8
from headrace.quantize import shards
from headrace.quantize.base import LayerShape, Options, refuse_transposed

METHODS = ("fp8", "fp8_e5m2")


def verify(options: Options) -> None:
    if options.method not in METHODS:
        raise RequestError("format", "fp8", f"another for method {options.method}: it holds {' and '.join(METHODS)}")
    if options.group_size > 0:
        raise RequestError("group_size", options.group_size, "-1 (one scale an output) or 0 (one scale) for format fp8")


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    refuse_transposed("fp8", layers)


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.float32


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    if weight.scales is None or not weight.codes.is_floating_point():
        raise CheckpointError(f"{name}: the format fp8 holds 8-bit floats with scales")
    scales = weight.scales[0, 0].reshape(()) if options.group_size == 0 else weight.scales
    return {f"{name}.weight": weight.codes, f"{name}.weight_scale_inv": scales.clone()}


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None,
        "modules_to_not_convert": list(plain_layers),
    }


read = fp8.read
finish = shards.finish
