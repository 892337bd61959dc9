"""Qwen's models with gated delta rules as GGUF files: the names and orders that llama.cpp's converter gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.harness import follow, load, random_ids, save_random

from headrace import models

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def tiles(x: torch.Tensor, num_keys: int, num_values: int) -> torch.Tensor:
    """Value heads, which lie by key head, in tiles: the first of each key head, then the second of each."""
    heads = x.reshape(num_keys, num_values // num_keys, -1, *x.shape[1:])
    return heads.transpose(0, 1).reshape(x.shape)


def converted(name: str, x: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that one of a checkpoint becomes, by its names in llama.cpp's table, before that is looked up."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = keys * config["linear_key_head_dim"]
    is_tiled = config["model_type"] != "qwen3_next"
    if "shared_expert_gate" in name:
        return {name: x[0]}
    if name.endswith("in_proj_qkvz.weight"):
        sizes = [config["linear_key_head_dim"]] * 2 + [values // keys * config["linear_value_head_dim"]] * 2
        q, k, v, z = x.view(keys, -1, x.shape[1]).split(sizes, 1)
        stem = name.removesuffix("in_proj_qkvz.weight")
        qkv = torch.cat([part.reshape(-1, x.shape[1]) for part in (q, k, v)])
        return {stem + "in_proj_qkv.weight": qkv, stem + "in_proj_z.weight": z.reshape(-1, x.shape[1])}
    if name.endswith("conv1d.weight"):
        x = x[:, 0]
    if is_tiled and "linear_attn." in name:
        if "in_proj_qkv" in name or "conv1d" in name:
            x = torch.cat([x[: 2 * width], tiles(x[2 * width :], keys, values)])
        elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            x = tiles(x, keys, values)
        elif name.endswith("out_proj.weight"):
            x = tiles(x.T, keys, values).T
    if name.endswith("A_log"):
        x = -x.exp()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        x = x + 1
    return {name.replace("dt_bias", "dt_proj.bias"): x}


def write(directory: Path, path: Path, kind: Any = None) -> Path:
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * 0.25))
    writer.add_rope_freq_base(10000.0)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), 9)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        for original_name, weight in converted(name, tensor.float(), config).items():
            if ".experts." in original_name:
                head, _, tail = original_name.partition(".experts.")
                number, part, _ = tail.split(".")
                experts.setdefault(f"{head}.experts.{part}.weight", {})[int(number)] = weight
                continue
            theirs = table.get_name(original_name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, original_name
            writer.add_tensor(theirs, np.ascontiguousarray(weight.numpy()))
    for original_name, parts in experts.items():
        theirs = table.get_name(original_name, try_suffixes=(".weight",))
        assert theirs is not None, original_name
        writer.add_tensor(theirs, torch.stack([parts[i] for i in range(len(parts))]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("backend", ["torch_ref", "cpu"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_file_is_the_model_of_its_safetensors(model_type: str, backend: str, tmp_path: Path) -> None:
    """To rounding: value heads lie in another order, so a sum over them has another."""
    changes = {"mlp_only_layers": []} if model_type == "qwen3_next" else {}
    save_random(models.find(model_type).TINY | changes, tmp_path)
    path = write(tmp_path, tmp_path / "model.gguf")
    token_ids = random_ids(60, 199, 1)
    expected, actual = (follow(load(p, backend=backend, dtype="float32"), token_ids, [60]) for p in (tmp_path, path))
    assert (actual - expected).abs().max() < 2e-4
    assert expected.std() > 0.3
