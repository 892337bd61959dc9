"""The names and keys that GGUF files have for models with latent attention. `gguf_config` reads by it.

Newer files have the layer that makes keys and values of a latent as two tensors with a matrix for each head, the keys'
transposed; older files have it as one tensor, as checkpoints do. Called by `checkpoint.gguf_config`.
"""

from __future__ import annotations

from typing import Any, Protocol

from headrace.checkpoint.gguf_families import GATED, PARTS, PRE_NORMS, SHARED
from headrace.checkpoint.gguf_parts import Part

ARCHITECTURES = ("deepseek2", "mistral4")
LAYER = (
    {
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.kv_b_proj.k",
        "attn_v_b": "self_attn.kv_b_proj.v",
        "attn_output": "self_attn.o_proj",
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    }
    | PRE_NORMS
    | GATED
    | SHARED
)
OF_EXPERT = PARTS | {"ffn_gate_up": "gate_up_proj"}
SIGMOID = 2
"""The value of `expert_gating_func` for sigmoids; 1 is the softmax."""


class Keys(Protocol):
    prefix: str

    def integer(self, name: str) -> int: ...

    def optional(self, name: str, *, low: int = 1) -> int | None: ...

    def real(self, name: str) -> float | None: ...

    def flag(self, name: str) -> bool | None: ...


def model_type(keys: Keys) -> str:
    """Return the model_type. All models with sigmoids, as GLM-4.7-Flash and Kimi K2, are read as DeepSeek-V3."""
    if keys.prefix == "mistral4.":
        return "mistral4"
    return "deepseek_v3" if keys.optional("expert_gating_func") == SIGMOID else "deepseek_v2"


def config(keys: Keys) -> dict[str, Any]:
    """Return the settings of a config.json that `gguf_keys.decoder` does not read."""
    turned, rank = keys.integer("rope.dimension_count"), keys.optional("attention.q_lora_rank")
    of_head = keys.optional("attention.key_length_mla") or keys.integer("attention.key_length")
    groups = keys.optional("expert_group_count") or 1
    values = {
        "q_lora_rank": rank,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": of_head - turned,
        "v_head_dim": keys.optional("attention.value_length_mla") or keys.integer("attention.value_length"),
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "first_k_dense_replace": keys.optional("leading_dense_block_count", low=0) or 0,
        "n_group": groups,
        "topk_group": keys.optional("expert_group_used_count") or 1,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": bool(keys.flag("expert_weights_norm")),
        "routed_scaling_factor": keys.real("expert_weights_scale") or 1.0,
    }
    return values


def rope(keys: Keys) -> dict[str, float]:
    """Return the rope settings that other families do not have: the file's multiplier is a tenth of the model's."""
    tenth, growth = keys.real("rope.scaling.yarn_log_multiplier"), keys.real("attention.temperature_scale")
    values = {} if tenth is None else dict.fromkeys(("mscale", "mscale_all_dim"), 10 * tenth)
    return values if growth is None else values | {"llama_4_scaling_beta": growth}


def by_head(parts: dict[str, Part]) -> dict[str, Part]:
    """Return the parts, with one for each head in place of a part that holds the matrices of all heads."""
    heads: dict[str, Part] = {}
    for name, part in parts.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith((".kv_b_proj.k", ".kv_b_proj.v")) or len(part.shape) != 3:
            heads[name] = part
            continue
        num, rows, num_in = part.shape
        heads |= {f"{stem}.{h}.weight": Part(part.info, (rows, num_in), h * rows) for h in range(num)}
    return heads
