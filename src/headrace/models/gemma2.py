"""Gemma 2 (Gemma Team 2024): norms before and after each part, soft-capped scores and logits, alternating windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.backends.base import Array, Cache, RopeTable, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP
from headrace.models.unread import CAUSAL, Rules

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "gemma2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 512,
    "sliding_window": 29,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def make_attention(
    decoder: Decoder,
    name: str,
    layer_id: int,
    qk_norm_offset: float | None = None,
    rope_table: RopeTable | None = None,
) -> Attention:
    """Return the attention of a layer. Gemma 3 sets the last two arguments."""
    config = decoder.config
    bias = config.flag("attention_bias", False)
    options = AttentionOptions(
        bias,
        bias,
        qk_norm_offset,
        window=decoder.window(layer_id),
        softcap=config.number("attn_logit_softcapping", 0.0),
        scale=config.number("query_pre_attn_scalar", 256, low=1) ** -0.5,
        rope_table=rope_table,
    )
    return Attention(decoder, name, layer_id, options)


class Layer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))). `norms`: the names before and after attention,
    and before and after the MLP."""

    norms = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        before, after, before_mlp, after_mlp = (f"{name}.{norm}" for norm in self.norms)
        self.attention_norm, self.after_attention_norm = decoder.make_norm(before), decoder.make_post_norm(after)
        self.mlp_norm, self.after_mlp_norm = decoder.make_norm(before_mlp), decoder.make_post_norm(after_mlp)
        self.attention = self.make_attention(decoder, f"{name}.self_attn", layer_id)
        self.mlp = self.make_mlp(decoder, f"{name}.mlp", layer_id)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return GatedMLP(decoder, name)

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        return make_attention(decoder, name, layer_id)

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.after_attention_norm(self.attention(self.attention_norm(x), rows, kv))
        return x + self.after_mlp_norm(self.mlp(self.mlp_norm(x)))


class Model(Decoder):
    Layer = Layer
    unread: Rules = CAUSAL
    activation_key = "hidden_activation"
    default_activation = "gelu_pytorch_tanh"
    default_head_dim = 256
    default_tied = True
    norm_offset = 1.0

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        self.logit_cap = config.number("final_logit_softcapping", 0.0)

    def default_layer_type(self, layer_id: int) -> str:
        return "full_attention" if layer_id % 2 else "sliding_attention"

    def embed(self, token_ids: Array) -> Array:
        return self.ops.embedding(token_ids, self.embedding, self.hidden_size**0.5)

    def logits(self, hidden: Array, rows: Array) -> Array:
        logits = super().logits(hidden, rows)
        return self.ops.softcap(logits, self.logit_cap) if self.logit_cap else logits
