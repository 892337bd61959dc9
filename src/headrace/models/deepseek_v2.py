"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): latent attention, mixtures of many small experts and shared ones."""

from __future__ import annotations

from headrace.backends.base import Routing
from headrace.models.decoder import Decoder
from headrace.models.mla import LatentAttention, LatentDecoder, LatentLayer
from headrace.models.unread import Alias, Unread

TINY = {
    "model_type": "deepseek_v2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}


class Layer(LatentLayer):
    num_experts = 64

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> LatentAttention:
        return LatentAttention(decoder, name, layer_id)

    def routing(self, decoder: Decoder, name: str, num: int) -> Routing:
        """Weight experts by the softmax over all experts; choose groups by their best expert."""
        config = decoder.config
        in_groups = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
        groups = (config.integer("n_group"), config.integer("topk_group"), 1) if in_groups else None
        return Routing(
            config.integer("num_experts_per_tok"),
            groups=groups if groups and groups[0] > 1 else None,
            renormalise=False,
            scale=config.number("routed_scaling_factor", 1.0),
        )


class Model(LatentDecoder):
    Layer = Layer
    unread = (
        Unread("mlp_bias", False, "biases in this model's MLPs"),
        Unread("norm_topk_prob", False, "a division of the experts' weights by their sum in this model"),
        Unread("scoring_func", "softmax", "other scores of this model's experts"),
        Unread("moe_layer_freq", 1, "layers without experts between others in this model"),
        Alias("num_experts", "n_routed_experts"),
    )
