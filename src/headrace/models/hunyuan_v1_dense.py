"""Hunyuan's dense models (Tencent 2025): Llama with a norm on each head of q and k after they have turned."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import Array, Cache, HeadForm, Rows
from headrace.models.decoder import Attention, AttentionOptions, Decoder, PreNormLayer, RMSNorm

TINY = {
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 7.0, "factor": 1.0},
}


class LateNormAttention(Attention):
    """Attention that norms q and k after the rope."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int, bias: bool) -> None:
        super().__init__(decoder, name, layer_id, AttentionOptions(bias, bias))
        self.angles = decoder.rope_table
        parts = [(f"{name}.{part}_layernorm", self.heads.head_dim) for part in ("query", "key")]
        norms = [RMSNorm(decoder.weights, decoder.ops, *part, decoder.eps).of_head for part in parts]
        # They are turned already, so the form for the store has norms without a rope.
        self.form = HeadForm(None, *norms)

    def attend(self, qkv: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        num = self.heads.num_heads + self.heads.num_kv_heads
        return super().attend(self.ops.rope(qkv, num, self.heads.head_dim, rows, self.angles), rows, kv)


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        return LateNormAttention(decoder, name, layer_id, decoder.config.flag("attention_bias", False))


class Model(Decoder):
    Layer = Layer
    default_eps = 1e-5
