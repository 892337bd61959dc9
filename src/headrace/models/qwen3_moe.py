"""Qwen3's mixtures of experts (Yang et al. 2025): Qwen3 with small experts of which each row takes several."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array, Routing
from headrace.models import qwen3
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, GatedMLP
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_experts(decoder: Decoder, name: str, renormalise: bool | None = None, *, by_shape: bool = False) -> Experts:
    """Make experts weighted by the softmax over all experts, divided by its sum over the chosen ones if `renormalise`
    (None: as `norm_topk_prob` has it)."""
    config = decoder.config
    inner = config.integer("moe_intermediate_size")
    if renormalise is None:
        renormalise = config.flag("norm_topk_prob", False)
    routing = Routing(config.integer("num_experts_per_tok"), renormalise=renormalise)
    # transformers 5 writes one of the names, the releases have the other.
    key = "num_local_experts" if config.values.get("num_experts") is None else "num_experts"
    return Experts(decoder, name, config.integer(key, high=MAX_EXPERTS), inner, routing, by_shape=by_shape)


def has_experts(config: ModelConfig, layer_id: int) -> bool:
    """Return whether a layer is a mixture: each `decoder_sparse_step`-th is, except `mlp_only_layers`."""
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r:.80}, expected a list of layers")
    return layer_id not in dense and (layer_id + 1) % config.integer("decoder_sparse_step", 1) == 0


class Layer(qwen3.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        if not has_experts(decoder.config, layer_id):
            return GatedMLP(decoder, f"{name}.mlp")
        return make_experts(decoder, f"{name}.mlp")


class Model(qwen3.Model):
    Layer = Layer
    default_head_dim = None  # unlike Qwen3's, hidden_size / num_attention_heads

    def default_layer_type(self, layer_id: int) -> str:
        """Return the same for all layers: the config has no max_window_layers, unlike Qwen3's."""
        window = self.config.values.get("sliding_window", self.default_window)
        slides = window is not None and self.config.flag("use_sliding_window", False)
        return "sliding_attention" if slides else "full_attention"
