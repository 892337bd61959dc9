"""DeepSeek-V3 and R1 (DeepSeek-AI 2024), Kimi K2: V2 whose experts are chosen by sigmoids with a bias, in groups."""

from __future__ import annotations

from headrace.backends.base import Routing
from headrace.models.decoder import Decoder
from headrace.models.glm4_moe import sigmoid_routing
from headrace.models.mla import LatentDecoder, LatentLayer
from headrace.models.unread import Alias, Unread

TINY = {
    "model_type": "deepseek_v3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


class Layer(LatentLayer):
    num_dense = 3

    def routing(self, decoder: Decoder, name: str, num: int) -> Routing:
        return sigmoid_routing(decoder, name, num, groups=(8, 4), scale=2.5)


class Model(LatentDecoder):
    Layer = Layer
    unread = (
        Unread("scoring_func", "sigmoid", "other scores of this model's experts"),
        Unread("moe_layer_freq", 1, "layers without experts between others in this model"),
        Alias("num_local_experts", "n_routed_experts"),
    )
