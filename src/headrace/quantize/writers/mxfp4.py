"""MXFP4 as GPT-OSS's checkpoints have it and `quant.mxfp4` reads it: `<name>.weight_blocks` uint8 [out, in / 32, 16],
two codes a byte with the lower half first, and `<name>.weight_scales`, exponents of two with a bias of 127."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import mxfp4
from headrace.quantize import shards
from headrace.quantize.base import LayerShape, Options, refuse_transposed
from headrace.quantize.packing import mxfp4_parts


def verify(options: Options) -> None:
    if options.method != "mxfp4":
        raise RequestError("format", "mxfp4", f"another for method {options.method}: it holds mxfp4 alone")


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    refuse_transposed("mxfp4", layers)


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.float32


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    pairs, exponents = mxfp4_parts(weight, name)
    blocks = pairs.view(len(pairs), -1, mxfp4.GROUP // 2)
    return {f"{name}.weight_blocks": blocks, f"{name}.weight_scales": exponents}


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(plain_layers)}


read = mxfp4.read
finish = shards.finish
