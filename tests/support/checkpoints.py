"""Tiny checkpoints written by hand, right ones and wrong ones, without any framework's help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def llama_tensors(config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        outs = {"self_attn.q": hidden, "self_attn.k": kv, "self_attn.v": kv, "self_attn.o": hidden}
        shapes |= {f"{layer}.{name}_proj": (out, hidden) for name, out in outs.items()}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    tensors = {f"{n}.weight": torch.randn(s, generator=generator) * 0.2 for n, s in shapes.items()}
    norms = [f"model.layers.{i}.{n}" for i in range(config["num_hidden_layers"]) for n in
             ("input_layernorm", "post_attention_layernorm")] + ["model.norm"]  # fmt: skip
    tensors |= {f"{n}.weight": torch.ones(hidden) for n in norms}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_llama(directory: Path, tensors: dict[str, Tensor] | None = None, num_shards: int = 0, **changes: Any) -> Path:
    """Write a checkpoint; `changes` are of config.json. `num_shards` > 0 writes an index and as many files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    tensors = llama_tensors() if tensors is None else tensors
    if not num_shards:
        save_file(tensors, directory / "model.safetensors")
        return directory
    file_of = {name: f"model-{i % num_shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({n: tensors[n] for n, f in file_of.items() if f == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return directory
