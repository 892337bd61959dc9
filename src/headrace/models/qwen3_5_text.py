"""The text of Qwen3.5 and 3.6 (Qwen Team 2026): the gated delta rule in three of four layers, gated attention in each
fourth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.backends.base import Array, Cache, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import AttentionOptions, Decoder, GatedMLP
from headrace.models.recurrent import GatedAttention, GatedDelta

TINY = {
    "model_type": "qwen3_5_text",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "tie_word_embeddings": False,
}


class Layer:
    """x += attention or delta rule of norm(x); x += mlp(norm(x))."""

    Delta = GatedDelta

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        self.first_norm = decoder.make_norm(f"{name}.input_layernorm")
        self.mixer = self.make_mixer(decoder, name, layer_id)
        self.second_norm = decoder.make_norm(f"{name}.post_attention_layernorm")
        self.mlp = self.make_mlp(decoder, name, decoder.first_layer + layer_id)

    def make_mixer(self, decoder: Decoder, name: str, layer_id: int) -> GatedAttention | GatedDelta:
        if decoder.layer_type(layer_id) == "linear_attention":
            return self.Delta(decoder, f"{name}.linear_attn", layer_id)
        bias = decoder.config.flag("attention_bias", False)
        options = AttentionOptions(bias, bias, qk_norm_offset=decoder.norm_offset)
        return GatedAttention(decoder, f"{name}.self_attn", layer_id, options)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return GatedMLP(decoder, f"{name}.mlp")

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.mixer(self.first_norm(x), rows, kv)
        return x + self.mlp(self.second_norm(x))


class Model(Decoder):
    Layer: Callable[[Decoder, str, int], Layer] = Layer
    norm_offset = 1.0
    default_head_dim = 256
    layer_types = ("linear_attention", "full_attention")

    def default_layer_type(self, layer_id: int) -> str:
        interval = self.config.integer("full_attention_interval", 4)
        return "linear_attention" if (layer_id + 1) % interval else "full_attention"

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        return ModelConfig({"partial_rotary_factor": 0.25} | config.rope.values)
