"""The names that GGUF files have for the parts of Qwen's layers with a state. Data alone; `gguf_config` reads by it."""

from __future__ import annotations

MODELS = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
NO_MLP = frozenset(("qwen3_5_moe_text",))
"""Models all of whose layers are mixtures, of which a file says no other width."""
LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def renamed(name: str) -> str:
    """The model's name of a tensor that has no kind in the file, or one more than in the model."""
    block, _, kind = name.rpartition(".")
    if kind == "ssm_a" and block.startswith("blk."):
        return f"model.layers.{block[4:]}.linear_attn.rates"
    return name.replace(".linear_attn.dt.bias", ".linear_attn.dt_bias")
