"""Granite 4 (IBM 2025): Mamba2 in most layers, attention in the others, experts and a shared MLP, and Granite's
constant factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.backends.base import Array, Cache, Matrix, Routing, Rows
from headrace.models import granite
from headrace.models.decoder import MAX_EXPERTS, Attention, AttentionOptions, Decoder, Experts, SharedExperts, stacked
from headrace.models.mamba import Mamba2, MambaForm, heads_of, step_limits
from headrace.models.unread import Alias
from headrace.models.weights import Linear

TINY = {
    "model_type": "granitemoehybrid",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 24,
    "shared_intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_head": 12,
    "mamba_expand": 2,
    "max_position_embeddings": 512,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""The names of layers in releases, and in transformers 5."""


class SharedMLP:
    """output(act(gate) * up); gate and up are one layer, which GGUF files have as two."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        inner, hidden = decoder.config.integer("shared_intermediate_size", 1024), decoder.hidden_size
        self.ops, self.kind = decoder.ops, decoder.activation
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up: Matrix = stacked(decoder.weights, Linear(names, hidden, [inner, inner]), "input_linear")
        self.down: Matrix = decoder.weights.matrix(Linear([f"{name}.output_linear"], inner, [hidden]))

    def __call__(self, x: Array) -> Array:
        return self.ops.linear(self.ops.gated(self.ops.linear(x, self.gate_up), self.kind), self.down)


class Layer:
    """x += factor * mixer(norm(x)); x += factor * mlp(norm(x))."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        self.ops, self.factor = decoder.ops, decoder.config.number("residual_multiplier", 1.0)
        self.first_norm = decoder.make_norm(f"{name}.input_layernorm")
        self.mixer = self.make_mixer(decoder, name, layer_id)
        self.second_norm = decoder.make_norm(f"{name}.post_attention_layernorm")
        self.mlp: Callable[[Array], Array] = SharedMLP(decoder, f"{name}.shared_mlp")
        if num := decoder.config.integer("num_local_experts", 8, low=0, high=MAX_EXPERTS):
            routing = Routing(decoder.config.integer("num_experts_per_tok", 2))
            inner = decoder.intermediate_size
            experts = Experts(decoder, f"{name}.block_sparse_moe", num, inner, routing, router="router.layer")
            self.mlp = SharedExperts(experts, self.mlp)

    def make_mixer(self, decoder: Decoder, name: str, layer_id: int) -> Mamba2 | Attention:
        config = decoder.config
        if decoder.layer_type(layer_id) == "linear_attention":
            inner = config.integer("mamba_expand", 2) * decoder.hidden_size
            names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head")
            form = MambaForm(
                heads_of(config, names, inner),
                config.integer("mamba_d_conv", 4, low=2, high=64),
                bias=config.flag("mamba_proj_bias", False),
                conv_bias=config.flag("mamba_conv_bias", True),
                limits=step_limits(config),
                activation=decoder.activation,
            )
            return Mamba2(decoder, f"{name}.mamba", layer_id, form)
        bias, scale = config.flag("attention_bias", False), config.number("attention_multiplier", 1.0)
        rotates = config.values.get("position_embedding_type") == "rope"
        options = AttentionOptions(bias, bias, scale=scale, rotates=rotates)
        return Attention(decoder, f"{name}.self_attn", layer_id, options)

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.ops.scale(self.mixer(self.first_norm(x), rows, kv), self.factor)
        return x + self.ops.scale(self.mlp(self.second_norm(x)), self.factor)


class Model(granite.Model):
    Layer: Any = Layer
    unread = (Alias("layers_block_type", "layer_types"),)
    layer_types = ("linear_attention", "full_attention", *KINDS)

    def layer_type(self, layer_id: int) -> str:
        kind = super().layer_type(layer_id)
        return KINDS.get(kind, kind)

    def default_layer_type(self, layer_id: int) -> str:
        return "linear_attention"
