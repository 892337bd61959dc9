"""A checkpoint whose q, k and v are parts of three forms: codes whose inputs have an order of their own, those in
another order, and plain numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bench.stored import TEXT, edit, with_other_order
from safetensors.torch import load_file

from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint

V = "model.layers.0.self_attn.v_proj"


def mixed(source: Path, out: Path, bits: int = 8) -> Path:
    """GPTQ with act-order and zero points; in layer 0 k_proj has another order and v_proj is plain."""
    options = Options(method="gptq", bits=bits, group_size=64, act_order="group", symmetric=False)
    quantise_checkpoint(source, out, options, "gptq", TEXT)

    def change(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(V)]:
            del tensors[key]
        tensors[f"{V}.weight"] = load_file(source / "model.safetensors")[f"{V}.weight"]

    with_other_order(out, source)
    edit(out, change)
    return out
