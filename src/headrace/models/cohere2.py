"""Cohere's Command R7B and Command A (Cohere 2025): attention and MLP side by side behind one layer norm, windows in
three of four layers, and no positions in the fourth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.backends.base import Array, Cache, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, LayerNorm

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "cohere2",
    "vocab_size": 199,
    "hidden_size": 60,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 37,
    "logit_scale": 0.7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Layer:
    """x += attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        bias, window = decoder.config.flag("attention_bias", False), decoder.window(layer_id)
        self.norm = decoder.make_norm(f"{name}.input_layernorm")
        options = AttentionOptions(bias, bias, window=window, rotates=window is not None, paired=True)
        self.attention = Attention(decoder, f"{name}.self_attn", layer_id, options)
        self.mlp = GatedMLP(decoder, f"{name}.mlp")

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        normed = self.norm(x)
        x = x + self.attention(normed, rows, kv)
        return x + self.mlp(normed)


class Model(Decoder):
    Layer = Layer
    default_tied = True

    def default_layer_type(self, layer_id: int) -> str:
        pattern = self.config.integer("sliding_window_pattern", 4)
        return "sliding_attention" if (layer_id + 1) % pattern else "full_attention"

    def make_norm(self, name: str) -> LayerNorm:
        eps = self.config.number("layer_norm_eps", 1e-5)
        return LayerNorm(self, name, eps, bias=False)

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        self.logit_factor = config.number("logit_scale", 0.0625)

    def logits(self, hidden: Array, rows: Array) -> Array:
        return self.ops.scale(super().logits(hidden, rows), self.logit_factor)
