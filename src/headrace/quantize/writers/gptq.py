"""GPTQ's layout as `quant.formats.gptq` reads it, in version 1 (zero points less one), which all engines read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import gptq
from headrace.quantize import shards
from headrace.quantize.base import AFFINE, LayerShape, Options
from headrace.quantize.packing import packed


def verify(options: Options) -> None:
    is_affine = options.method in AFFINE and options.method != "smoothquant"
    if not is_affine or options.bits not in gptq.BITS or options.group_size == 0:
        text = f"{options.method}, {options.bits} bits, group_size {options.group_size}"
        raise RequestError("format", "gptq", f"compressed-tensors for {text}")


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    for name, (num_out, num_in, _) in layers.items():
        if num_out * options.bits % 32 or num_in * options.bits % 32:
            raise CheckpointError(
                f"{name} has {num_out} outputs and {num_in} inputs; GPTQ's layout wants whole words of "
                f"{options.bits} bits; the format compressed-tensors holds any"
            )


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.float16


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    num_in = weight.shape[1]
    if weight.scales is None or weight.zeros is None:
        raise CheckpointError(f"{name}: codes without scales and zero points have no place in GPTQ's layout")
    index = torch.arange(num_in) // weight.group
    codes = weight.codes
    if weight.permutation is not None:
        g_idx, back = torch.empty_like(index), torch.empty_like(codes)
        g_idx[weight.permutation], back[:, weight.permutation] = index, codes
        index, codes = g_idx, back
    stored = (weight.zeros - gptq.LAYOUTS["gptq"]).to(torch.uint8)
    return {
        f"{name}.qweight": packed(codes, options.bits).t().contiguous(),
        f"{name}.qzeros": packed(stored.t().contiguous(), options.bits),
        f"{name}.scales": weight.scales.t().contiguous().half(),
        f"{name}.g_idx": index.int(),
    }


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    calibrated = options.method == "gptq"
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": options.bits,
        "group_size": options.group_size,
        "sym": bool(options.symmetric),
        "desc_act": calibrated and options.act_order == "group",
        "static_groups": calibrated and options.act_order == "static",
        "damp_percent": options.damping,
        "true_sequential": False,
        "lm_head": False,
    }


read = gptq.read
finish = shards.finish
