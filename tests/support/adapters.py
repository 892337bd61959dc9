"""Adapters in PEFT's layout, written by hand, and checkpoints with an adapter merged into the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def write_adapter(
    directory: Path,
    weights: dict[str, Tensor],
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    spread: float = 0.2,
    targets: tuple[str, ...] = TARGETS,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter with random numbers for the layers of `weights` (a checkpoint's) whose names end in `targets`.
    `config`: further keys of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    (directory / "adapter_config.json").write_text(json.dumps(keys | config))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(weights.items()):
        layer = name.removesuffix(".weight")
        if layer.endswith(targets):
            for side, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                numbers = torch.randn(shape, generator=generator) * spread
                tensors[f"base_model.model.{layer}.lora_{side}.weight"] = numbers.to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(weights: dict[str, Tensor], adapter: Path, scale: float) -> dict[str, Tensor]:
    """Return a checkpoint's weights with an adapter's products added."""
    sides = load_file(adapter / "adapter_model.safetensors")
    changed = dict(weights)
    for name in sides:
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = sides[name.replace("lora_A", "lora_B")].double()
            changed[f"{layer}.weight"] = (
                weights[f"{layer}.weight"].double() + scale * b @ sides[name].double()
            ).float()
    return changed
