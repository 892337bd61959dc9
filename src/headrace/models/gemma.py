"""Gemma (Gemma Team 2024): Llama with wide heads, a GELU gate, and an embedding scaled by the root of its width."""

from __future__ import annotations

from headrace.backends.base import Array, Ops
from headrace.models import llama
from headrace.models.config import ModelConfig
from headrace.models.unread import CAUSAL, Rules
from headrace.models.weights import Weights

TINY = {
    "model_type": "gemma",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 512,
}


class Model(llama.Model):
    unread: Rules = CAUSAL
    default_activation = "gelu_pytorch_tanh"
    default_head_dim = 256
    default_tied = True
    norm_offset = 1.0

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        if self.activation == "gelu":  # the first releases say so, and mean the tanh form
            self.activation = "gelu_tanh"

    def embed(self, token_ids: Array) -> Array:
        return self.ops.embedding(token_ids, self.embedding, self.hidden_size**0.5)
