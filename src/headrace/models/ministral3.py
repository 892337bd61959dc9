"""Ministral 3 and Mistral Large 3's text (Mistral AI 2025): Mistral whose queries grow with the logarithm of their
position, beyond the context of the pretraining."""

from __future__ import annotations

import numpy as np

from headrace.backends.base import Array
from headrace.models import mistral
from headrace.models.decoder import Attention, AttentionOptions, Decoder

TINY = {
    "model_type": "ministral3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip


def query_scale(decoder: Decoder, factors: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Array:
    """Return a factor for each position [max_model_len], as `Attention` takes it."""
    return decoder.weights.constant_table(factors.astype(np.float32)[:, None])


def position_scale(decoder: Decoder) -> Array:
    """Return the factors of queries: the logarithm's argument grows by one with each length of the pretraining."""
    rope = decoder.global_rope(decoder.config)
    length = rope.integer("original_max_position_embeddings", decoder.config.integer("max_position_embeddings"))
    times = np.arange(decoder.max_model_len) // length
    return query_scale(decoder, 1 + rope.number("llama_4_scaling_beta", 0.0) * np.log(1 + times))


class Layer(mistral.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        window = decoder.window(layer_id)
        return Attention(decoder, name, layer_id, AttentionOptions(window=window, query_scale=position_scale(decoder)))


class Model(mistral.Model):
    Layer = Layer
    default_theta = 1_000_000.0
    default_eps = 1e-5
    default_head_dim = 128
    default_window = None
