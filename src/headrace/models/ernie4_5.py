"""ERNIE 4.5 without experts (Baidu 2025): Llama whose heads turn in neighbouring pairs."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, PreNormLayer

TINY = {
    "model_type": "ernie4_5",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "use_bias": True,
}


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("use_bias", False)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, paired=True))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return GatedMLP(decoder, f"{name}.mlp", bias=decoder.config.flag("use_bias", False))


class Model(Decoder):
    Layer = Layer
    default_theta = 500_000.0
    default_eps = 1e-5
    default_head_dim: int | None = 128
    default_tied = True
