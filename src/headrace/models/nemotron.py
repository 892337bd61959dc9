"""Nemotron and Minitron (NVIDIA 2024): layer norms around weights less one, squared ReLU, heads that turn in part."""

from __future__ import annotations

from headrace.models import llama
from headrace.models.decoder import MLP, Decoder, LayerNorm

TINY = {
    "model_type": "nemotron",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


class Layer(llama.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> MLP:
        return MLP(decoder, f"{name}.mlp", decoder.config.flag("mlp_bias", False))


class Model(llama.Model):
    Layer = Layer
    default_activation = "relu2"
    default_rotary_factor = 0.5

    def make_norm(self, name: str) -> LayerNorm:
        eps = self.config.number("norm_eps", 1e-5)
        return LayerNorm(self, name, eps, offset=1.0)
