"""bitsandbytes' layouts as `quant.formats.bitsandbytes` reads them: doubly quantised NF4, LLM.int8() with outliers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import bitsandbytes
from headrace.quantize import shards
from headrace.quantize.base import LayerShape, Options
from headrace.quantize.methods import nf4
from headrace.quantize.methods.llm_int8 import THRESHOLD, Int8Weight
from headrace.quantize.methods.nf4 import NF4Weight

METHODS = ("nf4", "llm_int8")


def verify(options: Options) -> None:
    if options.method not in METHODS:
        raise RequestError("format", "bitsandbytes", f"another for method {options.method}: it holds nf4 and llm_int8")


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    """Accepts any model: groups of 32 inputs and more are whole bytes."""


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.float32


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    if isinstance(weight, NF4Weight):
        return _nf4(f"{name}.weight", weight)
    if not isinstance(weight, Int8Weight) or weight.largest is None:
        raise CheckpointError(f"{name}: bitsandbytes holds what the methods {', '.join(METHODS)} give")
    parts = {
        f"{name}.weight": weight.codes,
        f"{name}.SCB": weight.largest,
        f"{name}.weight_format": torch.zeros((), dtype=torch.uint8),
    }
    if weight.columns is not None and weight.kept is not None:
        parts[f"{name}.outlier_columns"] = weight.columns.to(torch.int32)
        parts[f"{name}.outlier_weight"] = weight.kept
    return parts


def _nf4(name: str, weight: NF4Weight) -> dict[str, Tensor]:
    if weight.absmax is None or weight.nested is None:
        raise CheckpointError(f"{name}: its scales are not doubly quantised")
    codes = weight.codes.reshape(-1, 2)
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
        "nested_blocksize": nf4.NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": weight.offset,
    }
    return {
        name: (codes[:, :1] << 4 | codes[:, 1:]).contiguous(),
        f"{name}.absmax": weight.absmax,
        f"{name}.quant_map": torch.tensor(nf4.LEVELS),
        f"{name}.nested_absmax": weight.nested,
        f"{name}.nested_quant_map": nf4.table(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    four_bits = options.method == "nf4"
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four_bits,
        "load_in_8bit": not four_bits,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": THRESHOLD,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_skip_modules": list(plain_layers),
    }


read = bitsandbytes.read
finish = shards.finish
