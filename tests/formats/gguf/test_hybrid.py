"""Models of states beside attention as GGUF files: the names, orders and factors that llama.cpp's converter gives them,
written down here once more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.harness import BACKENDS, follow, load, random_ids, save_random

from headrace import models
from headrace.checkpoint import gguf_hybrid
from headrace.protocol.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
NEMOTRON = {"mlp_bias": False, "num_hidden_layers": 4}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("nemotron_h", "nemotron_h", NEMOTRON | {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"], "mlp_bias": True,
    }),
    ("nemotron_h_moe", "nemotron_h", NEMOTRON | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    }),
    ("nemotron_h_moe", "nemotron_h", NEMOTRON | {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "moe_latent_size": None,
    }),
    ("granitehybrid", "granitemoehybrid", {}),
    ("granitehybrid", "granitemoehybrid", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope",
    }),
    ("falcon-h1", "falcon_h1", {}),
    # A head that is tied to the table has the table's factor in the file too.
    ("falcon-h1", "falcon_h1", {
        "mamba_rms_norm": False, "tie_word_embeddings": True, "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0,
    }),
    ("lfm2", "lfm2", {}),
    ("lfm2moe", "lfm2_moe", {"routed_scaling_factor": 1.0}),
]  # fmt: skip
IDS = [f"{architecture}-{index}" for index, (architecture, _, _) in enumerate(CASES)]


def in_pairs(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def of_mamba(name: str, x: torch.Tensor, groups: int) -> torch.Tensor:
    """A tensor of a mixer with Mamba2."""
    if name.endswith("conv1d.weight"):
        return x.squeeze()
    if name.endswith("A_log"):
        return -x.exp()[:, None]
    if name.endswith(".D"):
        return x[:, None]
    return x.reshape(groups, -1) if name.endswith(("mamba.norm.weight", "mixer.norm.weight")) else x


def stacked(tensors: Tensors, pattern: str, merged: str) -> Tensors:
    """Each layer's experts, which `pattern` finds by layer, number and part, as one tensor under the name `merged`."""
    groups: dict[str, dict[int, torch.Tensor]] = {}
    pieces = {}
    for name, x in tensors.items():
        match = re.fullmatch(pattern, name)
        if match is None:
            pieces[name] = x
        else:
            groups.setdefault(merged.format(layer=match[1], part=match[3]), {})[int(match[2])] = x
    return pieces | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in groups.items()}


def nemotron_h(tensors: Tensors, config: dict[str, Any], writer: Any) -> Tensors:
    kinds, inner = config["layers_block_type"], config["intermediate_size"]
    has_experts = "moe" in kinds
    dense = "moe" if has_experts else "mlp"
    inner = config["moe_intermediate_size"] if has_experts else inner
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    writer.add_feed_forward_length([inner * (kind == dense) for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    sizes = config["conv_kernel"], config["mamba_num_heads"], config["mamba_head_dim"]
    states(writer, *sizes, config["n_groups"], config["ssm_state_size"])
    if has_experts:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config["moe_latent_size"] is not None:
            writer.add_moe_latent_size(config["moe_latent_size"])
    result = {}
    for name, x in tensors.items():
        original_name = re.sub(r"^model\.", "backbone.", name).replace(
            "e_score_correction_bias", "e_score_correction.bias"
        )
        original_name = original_name.replace("dt_bias", "dt.bias")
        result[original_name] = (
            of_mamba(name, x, config["n_groups"]) if "linear_attention" in kind_of(name, kinds) else x
        )
    pattern = r"backbone\.layers\.(\d+)\.mixer\.experts\.(\d+)\.(\w+)\.weight"
    return stacked(result, pattern, "model.layers.{layer}.mlp.experts.{part}.weight")


def kind_of(name: str, kinds: list[str]) -> str:
    match = re.search(r"layers\.(\d+)\.", name)
    return kinds[int(match[1])] if match else ""


def granitemoehybrid(tensors: Tensors, config: dict[str, Any], writer: Any) -> Tensors:
    kinds = config["layer_types"]
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    sizes = config["mamba_d_conv"], config["mamba_n_heads"], config["mamba_d_head"]
    states(writer, *sizes, config["mamba_n_groups"], config["mamba_d_state"])
    has_experts = config["num_local_experts"] > 0
    if has_experts:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    result: Tensors = {}
    for name, x in tensors.items():
        end = "_shexp.weight" if has_experts else ".weight"
        block = f"blk.{re.sub(r'[^0-9]', '', name.partition('layers.')[2].partition('.')[0])}"
        if name.endswith("shared_mlp.input_linear.weight"):
            result |= dict(zip((f"{block}.ffn_gate{end}", f"{block}.ffn_up{end}"), x.chunk(2), strict=True))
        elif name.endswith("shared_mlp.output_linear.weight"):
            result[f"{block}.ffn_down{end}"] = x
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            parts = x.chunk(2, 1)
            result |= dict(zip((f"{block}.ffn_gate_exps.weight", f"{block}.ffn_up_exps.weight"), parts, strict=True))
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            result[name] = in_pairs(x, heads)
        else:
            result[name.replace("dt_bias", "dt_proj.bias")] = of_mamba(name, x, config["mamba_n_groups"])
    return result


def falcon_h1(tensors: Tensors, config: dict[str, Any], writer: Any) -> Tensors:
    """With all of its factors in the weights."""
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    sizes = config["mamba_d_conv"], config["mamba_n_heads"], config["mamba_d_head"]
    states(writer, *sizes, config["mamba_n_groups"], config["mamba_d_state"])
    entry, inner = config["attention_in_multiplier"], config["mamba_d_ssm"]
    keys = config["mamba_n_groups"] * config["mamba_d_state"]
    widths = torch.tensor([inner, inner, keys, keys, config["mamba_n_heads"]])
    factors = {
        "down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0], "v_proj": entry,
        "k_proj": entry * config["key_multiplier"], "q_proj": entry, "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    result = {}
    for name, x in tensors.items():
        part = name.split(".")[-2]
        if part == "in_proj":
            parts = torch.tensor(config["ssm_multipliers"]).repeat_interleave(widths)
            x = x * config["ssm_in_multiplier"] * parts[:, None]
        elif part in factors:
            x = x * factors[part]
        result[name.replace("dt_bias", "dt_proj.bias")] = of_mamba(name, x, config["mamba_n_groups"])
    return result


def lfm2(tensors: Tensors, config: dict[str, Any], writer: Any) -> Tensors:
    kinds = config["layer_types"]
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    inner = config["intermediate_size"]
    if config["model_type"] == "lfm2":
        inner = -(-int(2 * inner / 3) // config["block_multiple_of"]) * config["block_multiple_of"]
    else:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_feed_forward_length(inner)
    result = {}
    for name, x in tensors.items():
        original_name = name.replace(".expert_bias", ".expert_bias.bias")
        result[original_name] = x.squeeze(1) if name.endswith("conv.conv.weight") else x
    pattern = r"model\.layers\.(\d+)\.feed_forward\.experts\.(\d+)\.(\w+)\.weight"
    return stacked(result, pattern, "layers.{layer}.feed_forward.experts.{part}.weight")


CONVERTERS: dict[str, Callable[[Tensors, dict[str, Any], Any], Tensors]] = {
    "nemotron_h": nemotron_h, "granitemoehybrid": granitemoehybrid, "falcon_h1": falcon_h1, "lfm2": lfm2,
    "lfm2_moe": lfm2,
}  # fmt: skip


def states(writer: Any, conv: int, heads: int, head_dim: int, groups: int, size: int) -> None:
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_state_size(size)


def write(directory: Path, path: Path, architecture: str) -> Path:
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config.get("num_hidden_layers") or len(config["layers_block_type"]))
    writer.add_head_count(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
    tensors = {name: x.float() for name, x in load_file(directory / "model.safetensors").items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, 9)
    for name, x in CONVERTERS[config["model_type"]](tensors, config, writer).items():
        gguf_name = name if name.startswith("blk.") else table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, np.ascontiguousarray(x.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("architecture", "model_type", "changes"), CASES, ids=IDS)
def test_a_hybrids_file_is_the_model_of_its_safetensors(
    architecture: str, model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """To rounding: rates of decay were computed by another hand, and factors are in the weights."""
    save_random(models.find(model_type).TINY | changes, tmp_path)
    path = write(tmp_path, tmp_path / "model.gguf", architecture)
    token_ids = random_ids(60, 199, 1)
    for backend in BACKENDS:
        expected, actual = (
            follow(load(p, backend=backend, dtype="float32"), token_ids, [60]) for p in (tmp_path, path)
        )
        assert (actual - expected).abs().max() < 2e-4, backend
        assert expected.std() > 0.3


def test_control_the_two_vectors_of_a_state_are_not_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(models.find("falcon_h1").TINY, tmp_path)
    path = write(tmp_path, tmp_path / "model.gguf", "falcon-h1")
    token_ids = random_ids(30, 199, 1)
    right = follow(load(path, dtype="float32"), token_ids, [30])
    monkeypatch.setattr(gguf_hybrid, "NO_KIND", {"ssm_a": "D", "ssm_d": "rates"})
    assert not torch.allclose(follow(load(path, dtype="float32"), token_ids, [30]), right, atol=1e-2)


def test_heads_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    save_random(models.find("lfm2").TINY, tmp_path)
    path = tmp_path / "model.gguf"

    class Uneven(gguf.GGUFWriter):
        def add_head_count_kv(self, count: Any) -> None:
            super().add_head_count_kv([2, 3, 0, 0])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gguf, "GGUFWriter", Uneven)
        write(tmp_path, path, "lfm2")
    with pytest.raises(CheckpointError, match=r"lfm2\.attention\.head_count_kv.*the same for all layers that have it"):
        load(path)
