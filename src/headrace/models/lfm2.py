"""LFM2 (Liquid AI 2025): short gated convolutions in most layers, grouped-query attention in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.backends.base import Array, Cache, Rows
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, RMSNorm
from headrace.models.recurrent import conv_weight
from headrace.models.weights import Linear

TINY = {
    "model_type": "lfm2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 150,
    "block_multiple_of": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}


class ShortConv:
    """out(c * conv(b * x)), where b, c and x are parts of one projection."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        weights, width = decoder.weights, decoder.hidden_size
        self.ops, self.layer_id, self.width = decoder.ops, layer_id, width
        size = decoder.config.integer("conv_L_cache", 3, low=2, high=64)
        bias = decoder.config.flag("conv_bias", False)
        decoder.keep_states(layer_id, (size - 1, width))
        self.into = weights.matrix(Linear([f"{name}.in_proj"], width, [3 * width], bias=bias))
        self.weight = conv_weight(weights, f"{name}.conv", width, size)
        self.bias = weights.constant(weights.numbers(f"{name}.conv.bias", (width,))) if bias else None
        self.out = weights.matrix(Linear([f"{name}.out_proj"], width, [width], bias=bias))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, width = self.ops, self.width
        (past,) = kv[self.layer_id].arrays
        parts = ops.linear(x, self.into)
        b, c, x = (ops.columns(parts, i * width, width) for i in range(3))
        mixed = ops.conv(ops.multiply(x, b, "identity"), self.weight, self.bias, "identity", rows, past)
        return ops.linear(ops.multiply(mixed, c, "identity"), self.out)


class Layer:
    """x += attention or convolution of norm(x); x += mlp(norm(x))."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        self.first_norm = decoder.make_norm(f"{name}.operator_norm")
        is_conv = decoder.layer_type(layer_id) == "conv"
        self.mixer: ShortConv | Lfm2Attention
        if is_conv:
            self.mixer = ShortConv(decoder, f"{name}.conv", layer_id)
        else:
            self.mixer = Lfm2Attention(decoder, f"{name}.self_attn", layer_id)
        self.second_norm = decoder.make_norm(f"{name}.ffn_norm")
        self.mlp = self.make_mlp(decoder, f"{name}.feed_forward", layer_id)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return GatedMLP(decoder, name, inner=inner_size(decoder), parts=("w1", "w3", "w2"))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.mixer(self.first_norm(x), rows, kv)
        return x + self.mlp(self.second_norm(x))


class Lfm2Attention(Attention):
    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        super().__init__(decoder, name, layer_id, AttentionOptions(out="out_proj"))
        weights, ops, size = decoder.weights, decoder.ops, decoder.head_dim
        q_norm = RMSNorm(weights, ops, f"{name}.q_layernorm", size, decoder.eps).of_head
        k_norm = RMSNorm(weights, ops, f"{name}.k_layernorm", size, decoder.eps).of_head
        self.form = self.form._replace(q_norm=q_norm, k_norm=k_norm)


def inner_size(decoder: Decoder) -> int:
    """Return the MLP's width: two thirds of intermediate_size, scaled and rounded up, unless the config forbids it."""
    config, inner = decoder.config, decoder.intermediate_size
    if not config.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = config.integer("block_multiple_of", 256)
    return -(-inner // multiple) * multiple


class Model(Decoder):
    Layer: Callable[[Decoder, str, int], Layer] = Layer
    layer_types = ("conv", "full_attention")
    final_norm = "embedding_norm"
    eps_key = "norm_eps"
    default_eps = 1e-5
    default_theta = 1_000_000.0
    default_tied = True

    def default_layer_type(self, layer_id: int) -> str:
        ids = self.config.values.get("full_attn_idxs")
        return "full_attention" if not isinstance(ids, list) or layer_id in ids else "conv"
