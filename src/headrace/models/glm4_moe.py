"""GLM-4.5 to 4.7 (Z.ai 2025): GLM-4 whose halves turn, with small experts in groups, and some that all rows share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array, Routing
from headrace.models.decoder import (
    MAX_EXPERTS,
    Attention,
    AttentionOptions,
    Decoder,
    Experts,
    GatedMLP,
    PreNormLayer,
    SharedExperts,
)
from headrace.models.unread import Alias

TINY = {
    "model_type": "glm4_moe",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
}


def sigmoid_routing(
    decoder: Decoder, name: str, num: int, top_k: int = 8, groups: tuple[int, int] = (1, 1), scale: float = 1.0
) -> Routing:
    """Return a routing by sigmoids; for the choice, first of groups by their two best, then of experts, a bias is added
    to them. `top_k`, `groups` and `scale` are the defaults where the config has no such keys."""
    config = decoder.config
    num_groups, chosen = config.integer("n_group", groups[0]), config.integer("topk_group", groups[1])
    return Routing(
        config.integer("num_experts_per_tok", top_k),
        "sigmoid",
        bias=decoder.weights.tensor(f"{name}.gate.e_score_correction_bias", (num,)),
        groups=(num_groups, chosen, 2) if num_groups > 1 else None,
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", scale),
    )


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        config = decoder.config
        norm = 0.0 if config.flag("use_qk_norm", False) else None
        return Attention(
            decoder,
            name,
            layer_id,
            AttentionOptions(qkv_bias=config.flag("attention_bias", False), qk_norm_offset=norm),
        )

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        config, name = decoder.config, f"{name}.mlp"
        if layer_id < config.integer("first_k_dense_replace", 1, low=0):
            return GatedMLP(decoder, name)
        num, inner = config.integer("n_routed_experts", 128, high=MAX_EXPERTS), config.integer("moe_intermediate_size")
        routing = sigmoid_routing(decoder, name, num)
        shared = GatedMLP(decoder, f"{name}.shared_experts", inner=config.integer("n_shared_experts", 1) * inner)
        return SharedExperts(Experts(decoder, name, num, inner, routing), shared)


class Model(Decoder):
    Layer = Layer
    unread = (Alias("num_local_experts", "n_routed_experts"),)
    default_eps = 1e-5
    default_rotary_factor = 0.5
