"""Qwen1.5 and Qwen2's mixtures of experts (Yang et al. 2024): Qwen2 with small experts, and one that all rows share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array
from headrace.models import qwen2
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP
from headrace.models.qwen3_moe import has_experts, make_experts
from headrace.models.weights import Linear

TINY = {
    "model_type": "qwen2_moe",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "use_sliding_window": True,
    "sliding_window": 21,
    "max_window_layers": 2,
    "tie_word_embeddings": False,
}


class SharedExperts:
    """experts(x) + sigmoid(gate(x)) * shared(x)."""

    def __init__(self, decoder: Decoder, name: str, renormalise: bool | None = None) -> None:
        self.ops = decoder.ops
        self.experts = make_experts(decoder, name, renormalise)
        inner = decoder.config.integer("shared_expert_intermediate_size")
        self.shared = GatedMLP(decoder, f"{name}.shared_expert", inner=inner)
        self.gate = decoder.weights.matrix(Linear([f"{name}.shared_expert_gate"], decoder.hidden_size, [1], plain=True))

    def __call__(self, x: Array) -> Array:
        shared = self.ops.multiply(self.shared(x), self.ops.linear(x, self.gate), "sigmoid")
        return shared + self.experts(x)


class Layer(qwen2.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("qkv_bias", True)
        return Attention(decoder, name, layer_id, AttentionOptions(qkv_bias=bias, window=decoder.window(layer_id)))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        if not has_experts(decoder.config, layer_id):
            return GatedMLP(decoder, f"{name}.mlp")
        return SharedExperts(decoder, f"{name}.mlp")


class Model(qwen2.Model):
    Layer = Layer

    def default_layer_type(self, layer_id: int) -> str:
        lower = layer_id < self.config.integer("max_window_layers", 28, low=0) and layer_id % 2 == 0
        return "sliding_attention" if lower and self.config.flag("use_sliding_window", False) else "full_attention"
