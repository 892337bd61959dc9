"""Trinity (Arcee AI 2025): norms on both sides, gated attention with windows, no positions in each fourth layer, and
experts chosen with a bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.backends.base import Array, Cache, Routing, Rows
from headrace.models import gemma2
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Attention, AttentionOptions, Decoder, Experts, GatedMLP, SharedExperts
from headrace.models.weights import Linear

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "afmoe",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "route_scale": 1.7,
    "sliding_window": 37,
    "mup_enabled": True,
    "max_position_embeddings": 512,
}


class GatedAttention(Attention):
    """Attention whose heads are multiplied by sigmoids of the layer's input."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int, options: AttentionOptions) -> None:
        super().__init__(decoder, name, layer_id, options)
        width = decoder.num_heads * decoder.head_dim
        self.gate = decoder.weights.matrix(Linear([f"{name}.gate_proj"], decoder.hidden_size, [width]))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops = self.ops
        mixed = self.attend(ops.linear(x, self.qkv), rows, kv)
        return ops.linear(ops.multiply(mixed, ops.linear(x, self.gate), "sigmoid"), self.out)


class Layer(gemma2.Layer):
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias, window = decoder.config.flag("attention_bias", False), decoder.window(layer_id)
        # Layers without a window have no positions.
        options = AttentionOptions(bias, bias, qk_norm_offset=0.0, window=window, rotates=window is not None)
        return GatedAttention(decoder, name, layer_id, options)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        """Make experts chosen by sigmoids plus a bias, weighted without the bias."""
        config = decoder.config
        if layer_id < config.integer("num_dense_layers", 1, low=0):
            return GatedMLP(decoder, name)
        num, inner = config.integer("num_experts", 64, high=MAX_EXPERTS), config.integer("moe_intermediate_size", 1408)
        routing = Routing(
            config.integer("num_experts_per_tok", 6),
            "sigmoid",
            bias=decoder.weights.tensor(f"{name}.expert_bias", (num,)),
            scale=config.number("route_scale", 1.0),
        )
        shared = GatedMLP(decoder, f"{name}.shared_experts", inner=config.integer("num_shared_experts", 2) * inner)
        return SharedExperts(Experts(decoder, name, num, inner, routing, router="router.gate"), shared)


class Model(Decoder):
    Layer = Layer
    default_eps = 1e-5
    default_head_dim = 128
    default_window = 1024

    def default_layer_type(self, layer_id: int) -> str:
        every = self.config.integer("global_attn_every_n_layers", 4)
        return "sliding_attention" if (layer_id + 1) % every else "full_attention"

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        self.embedding_factor = self.hidden_size**0.5 if config.flag("mup_enabled", False) else 1.0

    def embed(self, token_ids: Array) -> Array:
        return self.ops.embedding(token_ids, self.embedding, self.embedding_factor)
