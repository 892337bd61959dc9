"""Granite 3 and 4 (IBM 2024): Llama with four constant factors, on embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.backends.base import Array, Cache, Rows
from headrace.models import llama
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "granite",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}


class Layer(llama.Layer):
    """x += factor * attention(norm(x)); x += factor * mlp(norm(x))."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        super().__init__(decoder, name, layer_id)
        self.ops, self.factor = decoder.ops, decoder.config.number("residual_multiplier", 1.0)

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias, scale = decoder.config.flag("attention_bias", False), decoder.config.number("attention_multiplier", 1.0)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, scale=scale))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.ops.scale(self.attention(self.attention_norm(x), rows, kv), self.factor)
        return x + self.ops.scale(self.mlp(self.mlp_norm(x)), self.factor)


class Model(llama.Model):
    Layer = Layer

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        self.embedding_factor = config.number("embedding_multiplier", 1.0)
        self.logit_factor = 1.0 / config.number("logits_scaling", 1.0, low=1e-6)

    def embed(self, token_ids: Array) -> Array:
        return self.ops.embedding(token_ids, self.embedding, self.embedding_factor)

    def logits(self, hidden: Array, rows: Array) -> Array:
        return self.ops.scale(super().logits(hidden, rows), self.logit_factor)
