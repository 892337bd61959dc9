"""GLM-4.7-Flash (Z.ai 2026): GLM-4.5's mixtures with the latent attention of DeepSeek-V3."""

from __future__ import annotations

from headrace.backends.base import Routing
from headrace.models.config import MAX_LAYERS, ModelConfig
from headrace.models.decoder import Decoder
from headrace.models.glm4_moe import sigmoid_routing
from headrace.models.mla import LatentDecoder, LatentLayer
from headrace.models.unread import Alias

TINY = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 6,
    "v_head_dim": 25,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


class Layer(LatentLayer):
    num_experts = 64

    def is_dense(self, config: ModelConfig, layer_id: int) -> bool:
        """Return whether a layer has no mixture: by `mlp_layer_types`, else only the first. The layer for multi-token
        prediction, which follows the listed layers, has one."""
        kinds = config.words("mlp_layer_types", config.integer("num_hidden_layers", high=MAX_LAYERS))
        return layer_id == 0 if kinds is None else kinds[layer_id : layer_id + 1] == ["dense"]

    def routing(self, decoder: Decoder, name: str, num: int) -> Routing:
        return sigmoid_routing(decoder, name, num, top_k=4, scale=1.8)


class Model(LatentDecoder):
    Layer = Layer
    unread = (Alias("num_local_experts", "n_routed_experts"),)
    default_eps = 1e-5
