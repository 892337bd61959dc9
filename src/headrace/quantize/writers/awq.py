"""AWQ's "gemm" layout as `quant.formats.awq` reads it: 4 bits with zero points, eight reordered outputs a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import awq
from headrace.quantize import shards
from headrace.quantize.base import AFFINE, LayerShape, Options, refuse_transposed
from headrace.quantize.packing import packed


def verify(options: Options) -> None:
    ordered = options.method == "gptq" and options.act_order == "group"
    if options.method not in AFFINE or options.bits != 4 or options.group_size == 0 or ordered:
        text = f"{options.method}, {options.bits} bits, group_size {options.group_size}"
        raise RequestError(
            "format", "awq", f"compressed-tensors or gptq for {text}: awq holds 4 bits in groups of neighbours"
        )


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    refuse_transposed("awq", layers)
    for name, shape in layers.items():
        if shape.num_out % 8:
            raise CheckpointError(f"{name} has {shape.num_out} outputs; AWQ's layout wants eights of outputs")


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.float16


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    if weight.scales is None or weight.zeros is None:
        raise CheckpointError(f"{name}: codes without scales and zero points have no place in AWQ's layout")
    return {
        f"{name}.qweight": _words(weight.codes),
        f"{name}.qzeros": _words(weight.zeros.to(torch.uint8)),
        f"{name}.scales": weight.scales.t().contiguous().half(),
    }


def _words(codes: Tensor) -> Tensor:
    """uint8 [out, n] -> int32 [n, out / 8]."""
    columns = codes.t().reshape(codes.shape[1], -1, 8)
    stored = torch.empty_like(columns)
    stored[:, :, list(awq.PLACES)] = columns
    return packed(stored.flatten(1), 4)


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": options.bits,
        "group_size": options.group_size,
        "zero_point": True,
        "modules_to_not_convert": list(plain_layers) or None,
    }


read = awq.read
finish = shards.finish
