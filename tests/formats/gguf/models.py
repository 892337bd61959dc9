"""GGUF files of small models, written by gguf-py: the tests' models by another's hand.

The names and what llama.cpp's converter does to the weights (rows of q and k in pairs, norms of Gemma and one more) are
written down here once more and on their own, so that a mistake in headrace's table is not repeated.
"""

from __future__ import annotations

import json
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
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_vl": "qwen3vl",
}  # fmt: skip
NAMES = (
    ("model.language_model.", "model."),
    ("model.embed_tokens", "token_embd"), ("lm_head", "output"), ("model.norm", "output_norm"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"), ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"), ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate.", "ffn_gate_inp."), ("model.layers.", "blk."),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
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
    others = GEMMA if model_type.startswith("gemma") else (("post_attention_layernorm", "ffn_norm"),)
    for theirs, ours in (*NAMES, *others):
        name = name.replace(theirs, ours)
    return name


def plain(name: str, weight: F32) -> tuple[NDArray[Any], Any]:
    return weight, None


def convert(directory: Path, path: Path, form: Form = plain, fields: Callable[[Any], None] | None = None) -> Path:
    """Write the checkpoint in `directory` as the GGUF file `path`. `fields` adds to the metadata."""
    config = json.loads((directory / "config.json").read_text())
    model_type = config["model_type"]
    config = config | config.get("text_config", {}) | {"model_type": model_type}
    writer = gguf.GGUFWriter(path, ARCHITECTURES[model_type])
    add_metadata(writer, config)
    if fields is not None:
        fields(writer)
    experts: dict[str, dict[int, F32]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        weight = np.ascontiguousarray(converted(name, tensor.float(), config).numpy())
        if ".visual." in name:
            continue  # a file of its own, mmproj
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            head = head.rpartition(".")[0]
            number, part, _ = tail.split(".")
            stem = EXPERTS[part]
            experts.setdefault(f"{gguf_name(head, model_type)}.{stem}.weight", {})[int(number)] = weight
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


def add(writer: Any, name: str, weight: F32, form: Form) -> None:
    values, kind = form(name, weight) if weight.ndim > 1 and "ffn_gate_inp" not in name else (weight, None)
    writer.add_tensor(name, values, raw_dtype=kind)


def converted(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    model_type = config["model_type"]
    if model_type == "gpt2" and ".c_" in name and name.endswith(".weight"):
        return tensor.t()
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]  # the converter leaves out a dimension of one
    if ARCHITECTURES[model_type] == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads"]
        heads = heads if "q_proj" in name else config.get("num_key_value_heads") or heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def add_metadata(writer: Any, config: dict[str, Any]) -> None:
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
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
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
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def llama3_factors(config: dict[str, Any]) -> F32 | None:
    """What each frequency is divided by, as the converter works it out for Llama 3.1."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    made = []
    for i in range(0, dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if length < high:
            made.append(1.0)
        elif length > low:
            made.append(rope["factor"])
        else:
            share = rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]
            share /= rope["high_freq_factor"] - rope["low_freq_factor"]
            made.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(made, np.float32)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> tuple[NDArray[np.uint8], F32]:
    """Random bytes that are blocks of weights of about 1 / sqrt(in), and what gguf-py makes of them."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (int(np.prod(shape)) // elements, size), np.uint8)
    wanted = shape[-1] ** -0.5
    scales = np.full(len(raw), 1e-3)
    for _ in range(2):
        set_scale(kind, raw, scales)
        weight = gguf.quants.dequantize(raw, number)
        scales = scales * wanted / np.sqrt((weight.astype(np.float64) ** 2).mean(1) + 1e-30)
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
