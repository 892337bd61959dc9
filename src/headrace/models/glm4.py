"""GLM-4-0414 (Z.ai 2025): GLM-4 with norms behind attention and MLP too."""

from __future__ import annotations

from headrace.models import gemma2, glm
from headrace.models.decoder import Attention, Decoder

TINY = {
    "model_type": "glm4",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


class Layer(gemma2.Layer):
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        return glm.make_attention(decoder, name, layer_id)


class Model(Decoder):
    Layer = Layer
    default_eps = glm.Model.default_eps
    default_head_dim = glm.Model.default_head_dim
    default_rotary_factor = glm.Model.default_rotary_factor
