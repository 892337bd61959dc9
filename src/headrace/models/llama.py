"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm, rotary positions, GQA, SiLU-gated MLP."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, PreNormLayer

TINY = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("attention_bias", False)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return GatedMLP(decoder, f"{name}.mlp", bias=decoder.config.flag("mlp_bias", False))


class Model(Decoder):
    Layer = Layer
