"""BitNet b1.58 (Ma et al. 2024): Llama with a norm before the last layer of attention and MLP, and squared ReLU.

Its weights are ternary; `quant.formats.bitnet` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import Array, Cache, Rows
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, PreNormLayer, RMSNorm

TINY = {
    "model_type": "bitnet",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class NormedAttention(Attention):
    """Attention with a norm of its sums before the output projection."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int, options: AttentionOptions) -> None:
        super().__init__(decoder, name, layer_id, options)
        width = self.heads.num_heads * self.heads.head_dim
        self.norm = RMSNorm(decoder.weights, decoder.ops, f"{name}.attn_sub_norm", width, decoder.eps)

    def mix(self, qkv: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        return self.ops.linear(self.norm(self.attend(qkv, rows, kv)), self.out)


class NormedMLP(GatedMLP):
    """down(norm(act(gate(x)) * up(x)))."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        super().__init__(decoder, name)
        inner = decoder.intermediate_size
        self.norm = RMSNorm(decoder.weights, decoder.ops, f"{name}.ffn_sub_norm", inner, decoder.eps)

    def __call__(self, x: Array) -> Array:
        return self.ops.linear(self.norm(self.ops.gated(self.ops.linear(x, self.gate_up), self.kind)), self.down)


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> NormedAttention:
        bias = decoder.config.flag("attention_bias", False)
        return NormedAttention(decoder, name, layer_id, AttentionOptions(bias, bias))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> NormedMLP:
        return NormedMLP(decoder, f"{name}.mlp")


class Model(Decoder):
    Layer = Layer
    default_activation = "relu2"
    default_theta = 500000.0
    default_eps = 1e-5
