"""Seed-OSS (ByteDance Seed 2025): Llama with heads of their own size, and biases on q, k and v."""

from __future__ import annotations

from headrace.models import llama
from headrace.models.decoder import Attention, AttentionOptions, Decoder

TINY = {
    "model_type": "seed_oss",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "max_position_embeddings": 512,
}


class Layer(llama.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        config = decoder.config
        inner, out = config.flag("attention_bias", True), config.flag("attention_out_bias", False)
        return Attention(decoder, name, layer_id, AttentionOptions(qkv_bias=inner, out_bias=out))


class Model(llama.Model):
    Layer = Layer
    default_head_dim = 128
