"""GGUF files of small models, written by gguf-py: the tests' models by another's hand.

The names and what llama.cpp's converter does to the weights (rows of q and k in pairs, norms of Gemma and one more) are
written down here once more and on their own, so that a mistake in headrace's table is not repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import gguf  # isort: skip

F32 = NDArray[np.float32]
Form = Callable[[str, F32], "tuple[NDArray[Any], Any]"]
"""(GGUF name, weights) -> what is written and its type."""

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_vl": "qwen3vl", "hy_v3": "hy_v3",
    "qwen2_5_vl": "qwen2vl", "muse_glimmer": "muse-glimmer",
}  # fmt: skip
FAMILIES = {
    "gpt_oss": "GPT_OSS", "phi3": "PHI3", "smollm3": "SMOLLM3", "seed_oss": "SEED_OSS", "granite": "GRANITE",
    "ministral3": "MISTRAL3", "olmo2": "OLMO2", "olmo3": "OLMO2", "starcoder2": "STARCODER2", "glm4": "GLM4",
    "glm4_moe": "GLM4_MOE", "cohere2": "COHERE2", "exaone4": "EXAONE4", "ernie4_5": "ERNIE4_5",
    "ernie4_5_moe": "ERNIE4_5_MOE", "hunyuan_v1_dense": "HUNYUAN_DENSE", "hunyuan_v1_moe": "HUNYUAN_MOE",
    "afmoe": "AFMOE", "nemotron": "NEMOTRON", "minimax_m2": "MINIMAXM2", "llama4_text": "LLAMA4", "apertus": "APERTUS",
    "gemma4_text": "GEMMA4", "glm": "CHATGLM", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2",
    "glm4_moe_lite": "DEEPSEEK2", "kimi_k2": "DEEPSEEK2", "mistral4": "MISTRAL4", "bitnet": "BITNET",
}  # fmt: skip
"""The names of these types' tensors are those of gguf-py's own table."""
ARCHITECTURES |= {
    model_type: gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[name]] for model_type, name in FAMILIES.items()
}  # fmt: skip
PAIRED = ("llama", "mistral", "mixtral", "smollm3", "granite", "ministral3", "muse_glimmer")
"""Whose rows of q and k the converter puts in pairs; those of other types lie as they do in the checkpoint."""
NAMES = (
    ("model.language_model.", "model."),
    ("mlp.router.gate", "ffn_gate_inp"), ("mlp.expert_bias", "exp_probs_b.bias"),
    ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"), ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
    ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
    ("model.embed_tokens", "token_embd"), ("lm_head", "output"), ("model.norm", "output_norm"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"), ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"), ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate.", "ffn_gate_inp."), ("model.layers.", "blk."),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.gate_proj", "attn_gate"),
    ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"), ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("transformer.wte", "token_embd"), ("transformer.wpe", "position_embd"), ("transformer.ln_f", "output_norm"),
    ("transformer.h.", "blk."), ("attn.c_attn", "attn_qkv"), ("attn.c_proj", "attn_output"), ("ln_1", "attn_norm"),
    ("ln_2", "ffn_norm"), ("mlp.c_fc", "ffn_up"), ("mlp.c_proj", "ffn_down"),
)  # fmt: skip
GEMMA = (
    ("post_attention_layernorm", "post_attention_norm"), ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)  # fmt: skip


EXPERTS = {
    "w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps",
    "gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps", "up_proj": "ffn_up_exps",
}  # fmt: skip


def gguf_name(name: str, model_type: str) -> str:
    if model_type in FAMILIES:
        for theirs, ours in (
            ("e_score_correction_bias", "e_score_correction.bias"), (".expert_bias", ".expert_bias.bias"),
            (".self_attn.sinks", ".self_attn.sinks.weight"), ("attn_sub_norm", "inner_attn_ln"),
            ("ffn_sub_norm", "ffn_layernorm"),
        ):  # fmt: skip
            name = name.replace(theirs, ours)
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[FAMILIES[model_type]], 9)
        result = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert result is not None, name
        return str(result)
    is_framed = model_type in ("gemma2", "gemma3_text", "muse_glimmer")
    others = GEMMA if is_framed else (("post_attention_layernorm", "ffn_norm"),)
    for theirs, ours in (*NAMES, *others):
        name = name.replace(theirs, ours)
    return name


def plain(name: str, weight: F32) -> tuple[NDArray[Any], Any]:
    return weight, None


def convert(
    directory: Path, path: Path, form: Form = plain, fields: Callable[[Any], None] | None = None, split: int = 0
) -> Path:
    """Write the checkpoint in `directory` as the GGUF file `path`. `fields` adds to the metadata. `split`: most tensors
    of a file, of which there are several then."""
    config = json.loads((directory / "config.json").read_text())
    model_type = config["model_type"]
    config = config | config.get("text_config", {}) | {"model_type": model_type}
    writer = gguf.GGUFWriter(path, ARCHITECTURES[model_type], split_max_tensors=split)
    add_metadata(writer, config, directory)
    if fields is not None:
        fields(writer)
    experts: dict[str, dict[int, F32]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "visual." in name or ".vision_" in name:
            continue  # a file of its own, mmproj
        weight = np.ascontiguousarray(converted(name, tensor.float(), config).numpy())
        if model_type in ("gpt_oss", "llama4_text") and ".experts." in name:
            whole_experts(writer, name, weight, form, model_type == "gpt_oss")
        elif ".act_fn." in name:
            continue  # of the metadata
        elif model_type == "gemma4_text" and re.search("router.|experts.|layer_scalar", name):
            gemma4_part(writer, name, weight, form)
        elif name.endswith("kv_b_proj.weight") and not config.get("is_old"):
            halves(writer, name, weight, config, form)
        elif ".experts." in name and name.count(".") < 7:
            part, rows = name.rpartition(".")[2], np.ascontiguousarray(weight)
            add(writer, f"blk.{name.split('.')[2]}.ffn_{part.removesuffix('_proj')}_exps.weight", rows, form)
        elif ".experts." in name:
            head, _, tail = name.replace("model.language_model.", "model.").partition(".experts.")
            number, part, _ = tail.split(".")
            stem = EXPERTS[part]
            experts.setdefault(f"blk.{head.split('.')[2]}.{stem}.weight", {})[int(number)] = weight
        elif name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        else:
            add(writer, gguf_name(name, model_type), weight, form)
    for name, parts in experts.items():
        add(writer, name, np.stack([parts[i] for i in range(len(parts))]), form)
    factors = llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def whole_experts(writer: Any, name: str, weight: F32, form: Form, alternate: bool) -> None:
    """Gate and up, whose columns alternate or follow each other, apart; matrices as [out, in]."""
    layer = name.split(".")[2]
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = weight if kind == "bias" else np.ascontiguousarray(weight.transpose(0, 2, 1))
    half = rows.shape[1] // 2
    cuts = (slice(0, None, 2), slice(1, None, 2)) if alternate else (slice(half), slice(half, None))
    parts = {"gate": rows[:, cuts[0]], "up": rows[:, cuts[1]]} if "gate_up" in name else {"down": rows}
    for part, values in parts.items():
        values = np.ascontiguousarray(values)
        stored, kind_of = form(name, values) if kind == "weight" else (values, None)
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{kind}", stored, raw_dtype=kind_of)


def gemma4_part(writer: Any, name: str, weight: F32, form: Form) -> None:
    """Tensors that gguf-py's table does not name, or without their kind."""
    layer, _, tail = name.removeprefix("model.layers.").partition(".")
    names = {
        "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale", "layer_scalar": "layer_output_scale.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    }  # fmt: skip
    add(writer, f"blk.{layer}.{names[tail]}", weight, form)


def add(writer: Any, name: str, weight: F32, form: Form) -> None:
    if "exp_probs_b" in name:
        weight = weight.squeeze()
    values, kind = form(name, weight) if weight.ndim > 1 and "ffn_gate_inp" not in name else (weight, None)
    writer.add_tensor(name, values, raw_dtype=kind)


def converted(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    model_type = config["model_type"]
    if model_type == "gpt2" and ".c_" in name and name.endswith(".weight"):
        return tensor.t()
    if ((model_type.startswith("gemma") and model_type != "gemma4_text") or model_type == "nemotron") and name.endswith(
        "norm.weight"
    ):
        return tensor + 1
    if model_type == "muse_glimmer" and name.endswith("layernorm.weight"):
        return tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]  # the converter leaves out a dimension of one
    if model_type in PAIRED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads"]
        heads = heads if "q_proj" in name else config.get("num_key_value_heads") or heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def add_metadata(writer: Any, config: dict[str, Any], directory: Path) -> None:
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    original = (config.get("rope_scaling") or {}).get("original_max_position_embeddings")
    writer.add_context_length(original or config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config.get("intermediate_size_mlp") or config["intermediate_size"])
    for key, method in (
        ("rms_norm_eps", writer.add_layer_norm_rms_eps), ("layer_norm_eps", writer.add_layer_norm_eps),
        ("norm_eps", writer.add_layer_norm_eps), ("norm_epsilon", writer.add_layer_norm_eps),
    ):  # fmt: skip
        if key in config:
            method(config[key])
    if "kv_lora_rank" in config:
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
    elif config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and config["model_type"] in ("mistral", "mixtral", "gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] in (*FAMILIES, "hy_v3", "muse_glimmer"):
        add_of_family(writer, config, directory)
    num_experts = next((config[key] for key in EXPERT_COUNTS if config.get(key)), 0)
    if num_experts:
        writer.add_expert_count(num_experts)
        counts = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
        used = next(config[key] for key in counts if config.get(key))
        writer.add_expert_used_count(used)


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def add_of_gemma4(writer: Any, config: dict[str, Any]) -> None:
    kinds, layers = config["layer_types"], config["per_layer_config"]
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_key_length(layers[str(kinds.index("full_attention"))]["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    num, inner = len(kinds), config["intermediate_size"]
    wide = [i >= num - config["num_kv_shared_layers"] and config["use_double_wide_mlp"] for i in range(num)]
    writer.add_feed_forward_length([inner * (2 if is_wide else 1) for is_wide in wide])
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([layers.get(str(i), {}).get("num_key_value_heads", heads) for i in range(num)])


def add_of_latent(writer: Any, config: dict[str, Any]) -> None:
    model_type, rope = config["model_type"], config["rope_parameters"]
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    dense = config.get("first_k_dense_replace")
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense") if dense is None else dense)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    sigmoid = model_type in ("deepseek_v3", "glm4_moe_lite", "kimi_k2")
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def halves(writer: Any, name: str, weight: F32, config: dict[str, Any], form: Form) -> None:
    """The layer that makes keys and values of a latent, as a matrix for each head: keys' are transposed."""
    layer = name.split(".")[2]
    by_head = weight.reshape(config["num_attention_heads"], -1, weight.shape[1])
    keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
    add(writer, f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(keys.transpose(0, 2, 1)), form)
    add(writer, f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(values), form)


def add_of_family(writer: Any, config: dict[str, Any], directory: Path) -> None:
    """What the converters of the families add."""
    model_type = config["model_type"]
    if model_type == "gemma4_text":
        add_of_gemma4(writer, config)
        return
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    if config.get("sliding_window") and model_type not in ("starcoder2", "smollm3", "minimax_m2"):
        writer.add_sliding_window(config["sliding_window"])
    if model_type in ("olmo3", "exaone4", "muse_glimmer") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if rope.get("partial_rotary_factor") or config.get("rotary_dim"):
        writer.add_rope_dimension_count(config.get("rotary_dim") or int(dim * rope["partial_rotary_factor"]))
    if model_type == "phi3" and rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if model_type == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if model_type == "cohere2":
        writer.add_logit_scale(config["logit_scale"])
    if model_type == "muse_glimmer":
        writer.add_logit_scale(config["output_multiplier"])
        for i in range(config["num_hidden_layers"]):
            for part, factor in (("q", config["qk_scale_factor"]), ("k", 1.0)):
                writer.add_tensor(f"blk.{i}.attn_{part}_norm.weight", np.full(dim, factor, np.float32))
    if model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if model_type == "apertus":
        tensors = load_file(directory / "model.safetensors")
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            numbers = [
                tensors[f"model.layers.{i}.mlp.act_fn.{part}"].item() for i in range(config["num_hidden_layers"])
            ]
            getattr(writer, f"add_xielu_{part}")(numbers)
    if model_type in ("gpt_oss", "hunyuan_v1_moe", "minimax_m2", "llama4_text"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if model_type == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if model_type == "glm4_moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_nextn_predict_layers(0)
    if model_type == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["router_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "kv_lora_rank" in config:
        add_of_latent(writer, config)
    if model_type == "afmoe":
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_scale(config["route_scale"])


def llama3_factors(config: dict[str, Any]) -> F32 | None:
    """What each frequency is divided by, as the converter works it out for Llama 3.1."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    result = []
    for i in range(0, dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if length < high:
            result.append(1.0)
        elif length > low:
            result.append(rope["factor"])
        else:
            share = rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]
            share /= rope["high_freq_factor"] - rope["low_freq_factor"]
            result.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(result, np.float32)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> tuple[NDArray[np.uint8], F32]:
    """Random bytes that are blocks of weights of about 1 / sqrt(in), and what gguf-py makes of them."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (int(np.prod(shape)) // elements, size), np.uint8)
    expected = shape[-1] ** -0.5
    scales = np.full(len(raw), 1e-3)
    for _ in range(2):
        set_scale(kind, raw, scales)
        weight = gguf.quants.dequantize(raw, number)
        scales = scales * expected / np.sqrt((weight.astype(np.float64) ** 2).mean(1) + 1e-30)
    row_bytes = shape[-1] // elements * size
    return raw.reshape(*shape[:-1], row_bytes), weight.reshape(shape)


def set_scale(kind: str, raw: NDArray[np.uint8], scales: NDArray[np.float64]) -> None:
    """Put a block's scale (and a smaller one for its minima) where the type keeps them."""
    where = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (),
             "NVFP4": (), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,))  # fmt: skip
    for i, at in enumerate(where):
        values = scales * (1, -1 if kind in ("Q4_1", "Q5_1") else 1)[i]
        raw[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":
        bits = scales.astype("<f2").view("<u2")
        for i in range(4):
            raw[:, 49 + 2 * i] = (raw[:, 49 + 2 * i] & 15) | ((bits >> 4 * i & 15) << 4).astype(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = np.clip(np.round(np.log2(scales)) + 128, 100, 140)
    if kind == "NVFP4":
        raw[:, :4] = raw[:, :4] % 16 + 8 * np.clip(np.round(np.log2(scales) + 8), 0, 13)[:, None].astype(np.uint8)
