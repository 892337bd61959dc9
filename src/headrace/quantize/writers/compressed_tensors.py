"""compressed-tensors' layouts as `quant.formats.compressed_tensors` reads them: codes packed into words
("pack-quantized"), symmetric 8 bits with one scale for each output or matrix as they are ("int-quantized", W8A8), 8-bit
floats ("float-quantized"), and MXFP4 ("mxfp4-pack-quantized")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import compressed_tensors
from headrace.quantize import shards
from headrace.quantize.base import LayerShape, Options, refuse_transposed
from headrace.quantize.packing import mxfp4_parts, packed

PACKED, PLAIN = "pack-quantized", "int-quantized"
FLOATS = {"fp8": "float-quantized", "mxfp4": "mxfp4-pack-quantized"}
"""Layouts of the methods whose codes are floats."""
OTHERS = {"nf4": "bitsandbytes", "llm_int8": "bitsandbytes", "fp8_e5m2": "fp8"}
"""Other formats, for the methods that this format has no layout for."""


def verify(options: Options) -> None:
    if options.method in OTHERS:
        raise RequestError("format", "compressed-tensors", f"{OTHERS[options.method]} for method {options.method}")
    if options.method == "gptq" and options.act_order == "group":
        # compressed-tensors no longer reads g_idx (0.20).
        raise RequestError("act_order", "group", "static or none for format compressed-tensors")


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    refuse_transposed("compressed-tensors", layers)


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if model_dtype == torch.bfloat16 else torch.float16


def layout(options: Options) -> str:
    if options.method in FLOATS:
        return FLOATS[options.method]
    return PLAIN if options.bits == 8 and options.group_size < 1 and options.symmetric else PACKED


def strategy(options: Options) -> str:
    """Which weights share a scale. The layout has no zero point of a whole matrix; each output gets one instead."""
    if options.group_size == 0 and options.symmetric:
        return "tensor"
    return "group" if options.group_size > 0 else "channel"


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    if options.method == "mxfp4":
        pairs, exponents = mxfp4_parts(weight, name)
        return {f"{name}.weight_packed": pairs, f"{name}.weight_scale": exponents}
    if weight.scales is None:
        raise CheckpointError(f"{name}: codes without scales have no place in {layout(options)}")
    scales = weight.scales if strategy(options) != "tensor" else weight.scales[:1, 0]
    parts = {f"{name}.weight_scale": scales.to(options.scale_dtype).contiguous()}
    if options.method == "fp8":
        return {f"{name}.weight": weight.codes} | parts
    if weight.zeros is None:
        raise CheckpointError(f"{name}: codes without zero points have no place in {layout(options)}")
    if layout(options) == PLAIN:
        return parts | {f"{name}.weight": (weight.codes.to(torch.int16) - 128).to(torch.int8)}
    parts[f"{name}.weight_packed"] = packed(weight.codes, options.bits)
    parts[f"{name}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
    if not options.symmetric:
        zeros = weight.zeros.to(torch.uint8).t().contiguous()
        parts[f"{name}.weight_zero_point"] = packed(zeros, options.bits).t().contiguous()
    return parts


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    ordered = options.method == "gptq" and options.act_order == "static" and options.group_size > 0
    weights = {
        "num_bits": options.bits,
        "type": "float" if options.method in FLOATS else "int",
        "symmetric": bool(options.symmetric),
        "strategy": strategy(options),
        "group_size": options.group_size if options.group_size > 0 else None,
        "dynamic": False,
        "observer": "minmax",
        "actorder": "weight" if ordered else None,
    }
    activations = None
    if layout(options) == PLAIN:
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": layout(options),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout(options),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(plain_layers),
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
    }


read = compressed_tensors.read
finish = shards.finish
