"""LFM2's mixtures of experts (Liquid AI 2025): LFM2 with experts behind its first layers."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array, Routing
from headrace.models import lfm2
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, GatedMLP

TINY = lfm2.TINY | {
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 40,
    "num_dense_layers": 1,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}


class Layer(lfm2.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        config, parts = decoder.config, ("w1", "w3", "w2")
        if layer_id < config.integer("num_dense_layers", 2, low=0):
            return GatedMLP(decoder, name, parts=parts)
        num = config.integer("num_experts", high=MAX_EXPERTS)
        has_bias = config.flag("use_expert_bias", True)
        routing = Routing(
            config.integer("num_experts_per_tok"),
            "sigmoid",
            decoder.weights.tensor(f"{name}.expert_bias", (num,)) if has_bias else None,
            renormalise=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
        )
        return Experts(decoder, name, num, config.integer("moe_intermediate_size"), routing, parts=parts)


class Model(lfm2.Model):
    Layer = Layer
