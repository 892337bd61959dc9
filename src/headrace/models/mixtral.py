"""Mixtral (Jiang et al. 2024): Mistral whose MLP is a mixture of experts, `num_experts_per_tok` for each row."""

from __future__ import annotations

from headrace.backends.base import Routing
from headrace.models import mistral
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts
from headrace.models.unread import Alias

TINY = {
    "model_type": "mixtral",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


class Layer(mistral.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Experts:
        """Weight experts by the softmax over the chosen ones."""
        num = decoder.config.integer("num_local_experts", 8, high=MAX_EXPERTS)
        routing = Routing(decoder.config.integer("num_experts_per_tok", 2))
        inner, parts = decoder.intermediate_size, ("w1", "w3", "w2")
        return Experts(decoder, f"{name}.block_sparse_moe", num, inner, routing, parts=parts)


class Model(mistral.Model):
    Layer = Layer
    unread = (Alias("num_experts", "num_local_experts"),)
    default_theta = 1_000_000.0
    default_eps = 1e-5
    default_window = None
