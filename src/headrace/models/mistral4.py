"""Mistral Small 4's text (Mistral AI 2026): DeepSeek-V3's latent attention with queries that grow with their position,
and experts chosen by a softmax."""

from __future__ import annotations

import numpy as np

from headrace.backends.base import Routing
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder
from headrace.models.ministral3 import position_scale
from headrace.models.mla import LatentAttention, LatentDecoder, LatentLayer
from headrace.models.unread import Alias

TINY = {
    "model_type": "mistral4",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Rope where config.json has none."""


class Layer(LatentLayer):
    num_experts = 128

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> LatentAttention:
        paired = decoder.config.flag("rope_interleave", True)
        return LatentAttention(decoder, name, layer_id, paired=paired, query_scale=position_scale(decoder))

    def routing(self, decoder: Decoder, name: str, num: int) -> Routing:
        """Choose groups by the sum of their two best shares of the softmax."""
        config = decoder.config
        groups = config.integer("n_group", 1), config.integer("topk_group", 1), 2
        # With a bias, even of zeros, groups are chosen by sums of shares; without, by sums of logits.
        shares = decoder.weights.constant(np.zeros(num, np.float32)) if groups[0] > 1 else None
        return Routing(
            config.integer("num_experts_per_tok", 4),
            bias=shares,
            groups=groups if groups[0] > 1 else None,
            renormalise=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
        )


class Model(LatentDecoder):
    Layer = Layer
    unread = (Alias("num_local_experts", "n_routed_experts"),)

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        has_rope = config.mapping("rope_parameters").values or config.mapping("rope_scaling").values
        return config.rope if has_rope else ModelConfig(config.rope.values | ROPE)
