"""Adapters in PEFT's layout, written by hand, and checkpoints with an adapter merged into the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.formats.gguf.models import ARCHITECTURES, converted, gguf_name
from torch import Tensor

import gguf  # isort: skip

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
    `config`: further keys of adapter_config.json; with use_dora, magnitudes around the norms of the base's rows."""
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
            if config.get("use_dora"):
                factors = 1 + torch.randn(weight.shape[0], generator=generator) * 0.3
                magnitudes = weight.float().norm(dim=1) * factors
                tensors[f"base_model.model.{layer}.lora_magnitude_vector"] = magnitudes.to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def write_gguf(adapter: Path, file: Path, base: Path, kind: str = "F32", **fields: Any) -> Path:
    """Write a PEFT adapter as llama.cpp's converter does, by gguf-py. base: the folder of its model. kind: the type of
    the numbers. fields: further metadata."""
    config = json.loads((base / "config.json").read_text())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    for key, value in fields.items():
        writer.add_string(key.replace("_", "."), value)
    for name, numbers in load_file(adapter / "adapter_model.safetensors").items():
        layer, side = name.removeprefix("base_model.model.").split(".lora_")
        values = numbers.float()
        if side == "B.weight":
            values = converted(f"{layer}.weight", values, config)
        stored = f"{gguf_name(f'{layer}.weight', config['model_type'])}.lora_{side[0].lower()}"
        form = gguf.GGMLQuantizationType[kind if values.shape[1] % 32 == 0 else "F32"]
        writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(values.numpy()), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def merged(weights: dict[str, Tensor], adapter: Path, scale: float) -> dict[str, Tensor]:
    """Return a checkpoint's weights with an adapter's products added, and its magnitudes, if any, as their rows' norms.
    Formula 5 of the paper of DoRA (arXiv 2402.09353), as PEFT merges it."""
    sides = load_file(adapter / "adapter_model.safetensors")
    changed = dict(weights)
    for name in sides:
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = sides[name.replace("lora_A", "lora_B")].double()
            whole = weights[f"{layer}.weight"].double() + scale * b @ sides[name].double()
            magnitudes = sides.get(name.replace("lora_A.weight", "lora_magnitude_vector"))
            if magnitudes is not None:
                whole *= (magnitudes.double() / whole.norm(dim=1))[:, None]
            changed[f"{layer}.weight"] = whole.float()
    return changed
