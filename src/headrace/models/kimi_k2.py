"""Kimi K2 (Moonshot AI 2025), and the text of K2.5 and K2.6: DeepSeek-V3 with fewer heads, its experts in one group."""

from __future__ import annotations

from headrace.models import deepseek_v3

TINY = deepseek_v3.TINY | {
    "model_type": "kimi_k2",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 15,
    "num_experts_per_tok": 5,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}


class Model(deepseek_v3.Model):
    """As DeepSeek-V3's; config.json of the releases has all keys whose defaults could differ."""
