"""Hunyuan 3 (Tencent 2026): Llama with a norm on each head of q and k, small experts chosen with a bias, and some that
all rows share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array, Routing
from headrace.models import llama
from headrace.models.decoder import MAX_EXPERTS, Attention, AttentionOptions, Decoder, Experts, GatedMLP, SharedExperts
from headrace.models.unread import Alias, Unread
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "hy_v3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


class Layer(llama.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("attention_bias", False)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, qk_norm_offset=0.0))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        """Make experts chosen by sigmoids plus a bias, weighted without the bias."""
        config, name = decoder.config, f"{name}.mlp"
        kinds = config.words("mlp_layer_types", decoder.num_layers) or ["dense"] + ["sparse"] * decoder.num_layers
        if kinds[layer_id] == "dense":
            return GatedMLP(decoder, name)
        if kinds[layer_id] != "sparse":
            raise CheckpointError(f"config.json: mlp_layer_types has {kinds[layer_id]!r:.80}, expected dense or sparse")
        num, inner = config.integer("num_experts", 192, high=MAX_EXPERTS), config.integer("moe_intermediate_size", 1536)
        routing = Routing(
            config.integer("num_experts_per_tok", 8),
            "sigmoid",
            bias=decoder.weights.tensor(f"{name}.expert_bias", (num,)),
            scale=config.number("router_scaling_factor", 2.826),
        )
        experts = Experts(decoder, name, num, inner, routing, router="router.gate")
        shared = config.integer("num_shared_experts", 1) * inner
        return SharedExperts(experts, GatedMLP(decoder, f"{name}.shared_mlp", inner=shared))


class Model(llama.Model):
    Layer = Layer
    unread = (
        Unread("mlp_bias", False, "biases in this model's MLPs"),
        Alias("num_local_experts", "num_experts"),
    )
    default_theta = 11_158_840.0
    default_eps = 1e-5
    default_head_dim = 128
