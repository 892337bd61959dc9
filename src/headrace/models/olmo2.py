"""OLMo 2 (OLMo Team 2024): Llama with norms behind attention and MLP, none before, and norms over all of q and of k."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import Array, Cache, Rows
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, RMSNorm

TINY = {
    "model_type": "olmo2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attention_bias": True,
}


class WideNormAttention(Attention):
    """Attention whose q and k are normed over all heads at once, before they turn."""

    def __init__(
        self, decoder: Decoder, name: str, layer_id: int, options: AttentionOptions = AttentionOptions()
    ) -> None:
        super().__init__(decoder, name, layer_id, options)
        self.q_width, self.k_width = (num * self.heads.head_dim for num in self.heads[:2])
        make = decoder.weights, decoder.ops
        self.wide_q_norm = RMSNorm(*make, f"{name}.q_norm", self.q_width, decoder.eps).of_head
        self.wide_k_norm = RMSNorm(*make, f"{name}.k_norm", self.k_width, decoder.eps).of_head

    def attend(self, qkv: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        qkv = self.ops.norm_columns(qkv, 0, 1, self.wide_q_norm)
        return super().attend(self.ops.norm_columns(qkv, self.q_width, 1, self.wide_k_norm), rows, kv)


class PostNormLayer:
    """x += norm(attention(x)); x += norm(mlp(x)). Subclasses define attention."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        self.attention = self.make_attention(decoder, f"{name}.self_attn", layer_id)
        self.attention_norm = decoder.make_norm(f"{name}.post_attention_layernorm")
        self.mlp = GatedMLP(decoder, f"{name}.mlp")
        self.mlp_norm = decoder.make_norm(f"{name}.post_feedforward_layernorm")

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("attention_bias", False)
        return WideNormAttention(decoder, name, layer_id, AttentionOptions(bias, bias))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.attention_norm(self.attention(x, rows, kv))
        return x + self.mlp_norm(self.mlp(x))


class Model(Decoder):
    Layer = PostNormLayer
    default_eps = 1e-5
