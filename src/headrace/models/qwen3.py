"""Qwen3 (Yang et al. 2025): Qwen2 without the biases, with an RMS norm on each head of q and k."""

from __future__ import annotations

from headrace.models import qwen2
from headrace.models.decoder import Attention, AttentionOptions, Decoder

TINY = {
    "model_type": "qwen3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


class Layer(qwen2.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("attention_bias", False)
        window = decoder.window(layer_id)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, qk_norm_offset=0.0, window=window))


class Model(qwen2.Model):
    Layer = Layer
    default_head_dim: int | None = 128
