"""ERNIE 4.5's mixtures of experts (Baidu 2025): small experts, chosen with a bias, and some that all rows share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array, Routing
from headrace.models import ernie4_5
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, GatedMLP, SharedExperts
from headrace.models.unread import Alias, Unread

TINY = {
    "model_type": "ernie4_5_moe",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "moe_num_experts": 7,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "max_position_embeddings": 512,
}


class Layer(ernie4_5.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        """Weight experts by the softmax over all experts, divided by its sum over the chosen ones."""
        config, name = decoder.config, f"{name}.mlp"
        end = config.integer("moe_layer_end_index", -1, low=-1)
        within = (
            config.integer("moe_layer_start_index", 1, low=0) <= layer_id <= (decoder.num_layers if end < 0 else end)
        )
        if not within or (layer_id + 1) % config.integer("moe_layer_interval", 1):
            return GatedMLP(decoder, name)
        num, inner = (
            config.integer("moe_num_experts", 64, high=MAX_EXPERTS),
            config.integer("moe_intermediate_size", 1536),
        )
        bias = decoder.weights.tensor(f"{name}.moe_statics.e_score_correction_bias", (1, num))
        experts = Experts(decoder, name, num, inner, Routing(config.integer("moe_k", 6), bias=bias))
        shared = config.integer("moe_num_shared_experts", 2, low=0)
        return (
            SharedExperts(experts, GatedMLP(decoder, f"{name}.shared_experts", inner=shared * inner))
            if shared
            else experts
        )


class Model(ernie4_5.Model):
    Layer = Layer
    unread = (
        Unread("moe_norm_min", 1e-12, "another least sum of the experts' weights"),
        Alias("num_experts", "moe_num_experts"),
        Alias("num_experts_per_tok", "moe_k"),
    )
    default_head_dim = None
