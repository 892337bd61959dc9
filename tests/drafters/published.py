"""Random checkpoints of drafters in published layouts, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.drafters import plain

HIDDEN, VOCAB, LAYERS = 48, 199, 6
TARGET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
BLOCK: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
}


def save(directory: Path, config: dict[str, Any], weights: plain.Weights) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(directory / "model.safetensors"))
    return directory


def eagle1_files(directory: Path, config: dict[str, Any]) -> plain.Weights:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if config.get("bias"):
        shapes["fc.bias"] = (HIDDEN,)
    for i in range(config["num_hidden_layers"]):
        shapes |= plain.layer_tensors(f"layers.{i}", config)
    del shapes["layers.0.input_layernorm.weight"]
    weights = plain.random_weights(shapes)
    save(directory, config, weights)
    return weights


EAGLE3: dict[str, dict[str, Any]] = {
    "published": {"draft_vocab_size": 64},
    "layers told": {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
    "layers told inside": {"draft_vocab_size": 64, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5]}},
    "whole vocabulary": {},
    "speculators": {"draft_vocab_size": 64, "norm_before_residual": True, "speculators": True},
    "two layers": {"draft_vocab_size": 64, "num_hidden_layers": 2},
    "norms of its output and of all features": {"norm_output": True, "norm_before_fc": True},
    "a norm of each layer's features": {
        "norm_output": True,
        "fc_norm": True,
        "eagle_config": {"norm_before_fc": False},
    },
}


def eagle3_files(
    directory: Path, change: dict[str, Any], own_table: bool = False
) -> tuple[plain.Weights, dict[str, Any]]:
    config = BLOCK | {"architectures": ["LlamaForCausalLMEagle3"]} | change
    output = config.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_config", {}).get(
        "eagle_aux_hidden_state_layer_ids", [0, 0, 0]
    )
    name = "layers.0" if config.pop("speculators", False) else "midlayer"
    size = config.get("draft_vocab_size", VOCAB)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(output) * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (size, HIDDEN),
        f"{name}.hidden_norm.weight": (HIDDEN,),
        **plain.layer_tensors(name, config, wide=2),
    }
    for i in range(1, config["num_hidden_layers"]):
        shapes |= plain.layer_tensors(f"layers.{i}", config)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(told) * HIDDEN,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(len(told))}
    if own_table:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    weights = plain.random_weights(shapes)
    if size < VOCAB:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:size].sort().values
        weights["d2t"] = ids - torch.arange(size)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    if name == "layers.0":  # as `speculators` writes it
        inner = {key: config.pop(key) for key in list(BLOCK) if key in config and key != "vocab_size"}
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": inner | {"vocab_size": VOCAB}}
        config["target_hidden_size"] = None
    save(directory, config, weights)
    return weights, BLOCK | change | {"name": name, "size": size}


MTP = {
    "deepseek": ("model.layers.6.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", False, False),
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "", "final_layernorm",
             True, True),
    "qwen3_next": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm", False, True),
}  # fmt: skip


def mtp_files(kind: str, config: dict[str, Any], bias: bool = False) -> tuple[plain.Weights, tuple[Any, ...]]:
    root, first, second, matrix, block, last, state_first, feeds_normed = MTP[kind]
    names = [root + part for part in (first, second, matrix, block, last)]
    names[3] = names[3].removesuffix(".")
    shapes: dict[str, tuple[int, ...]] = {f"{names[i]}.weight": (HIDDEN,) for i in (0, 1, 4)}
    shapes |= {f"{names[2]}.weight": (HIDDEN, 2 * HIDDEN), **plain.layer_tensors(names[3], config, bias=bias)}
    return plain.random_weights(shapes), (*names, state_first, feeds_normed)


def medusa_files(directory: Path, kind: str, num_heads: int = 4, num_blocks: int = 2) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {}
    ids = list(range(3, VOCAB, 3)) if "token_map" in kind else None
    size = VOCAB if ids is None else len(ids)
    block, head = "blocks.{k}.layers.{j}", "lm_heads.{k}"
    if kind.startswith("published"):
        prefix = "medusa_heads." if "prefixed" in kind else ""
        block, head = prefix + "{k}.{j}.linear", prefix + "{k}." + str(num_blocks)
    for k in range(num_heads):
        for j in range(num_blocks):
            name = block.format(k=k, j=j)
            shapes |= {f"{name}.weight": (HIDDEN, HIDDEN), f"{name}.bias": (HIDDEN,)}
        if kind not in ("vllm, one head", "vllm, the target's head") or (kind == "vllm, one head" and k == 0):
            shapes[f"{head.format(k=k)}.weight"] = (size, HIDDEN)
    weights = plain.random_weights(shapes)
    config: dict[str, Any] = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks}
    if kind.startswith("vllm"):
        config = {
            "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": num_heads,
            "num_hidden_layers": num_blocks, "truncated_vocab_size": size, "medusa_fc_bias": True,
            "original_lm_head": kind in ("vllm, one head", "vllm, the target's head"),
        }  # fmt: skip
    stored = dict(weights)
    if ids is not None:
        stored["token_map"] = torch.tensor(ids)
    save(directory, config, stored)
    return {"weights": weights, "block": block, "head": head, "ids": ids}
