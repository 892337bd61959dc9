"""GLM-4 (GLM Team 2024): Llama with biases on q, k, v, and heads of which half turns, in neighbouring pairs."""

from __future__ import annotations

from headrace.models.decoder import Attention, AttentionOptions, Decoder, PreNormLayer

TINY = {
    "model_type": "glm",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def make_attention(decoder: Decoder, name: str, layer_id: int) -> Attention:
    options = AttentionOptions(qkv_bias=decoder.config.flag("attention_bias", True), paired=True)
    return Attention(decoder, name, layer_id, options)


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        return make_attention(decoder, name, layer_id)


class Model(Decoder):
    Layer = Layer
    default_eps = 1.5625e-07
    default_head_dim = 128
    default_rotary_factor = 0.5
