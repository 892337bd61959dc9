"""Gemma 3, text only (Gemma Team 2025): Gemma 2 with q/k norms for soft caps, and a second rope."""

from __future__ import annotations

from headrace.models import gemma2
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, Decoder

TINY = {
    "model_type": "gemma3_text",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "sliding_window": 29,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}


class Layer(gemma2.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        local = decoder.layer_type(layer_id) == "sliding_attention"
        rope_table = decoder.local_rope_table if local and isinstance(decoder, Model) else None
        return gemma2.make_attention(decoder, name, layer_id, 1.0, rope_table)


class Model(gemma2.Model):
    Layer = Layer
    default_theta = 1_000_000.0

    def default_layer_type(self, layer_id: int) -> str:
        pattern = self.config.integer("sliding_window_pattern", 6)
        return "sliding_attention" if (layer_id + 1) % pattern else "full_attention"

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        by_type = config.mapping("rope_parameters")
        local = by_type.mapping("sliding_attention").values
        theta = config.number("rope_local_base_freq", 10000.0, low=1.0)
        self.local_rope_table = self.make_rope_table(
            ModelConfig({"rope_type": "default", "rope_theta": theta, **local})
        )
        full = by_type.mapping("full_attention").values
        return ModelConfig({"rope_type": "default", **full}) if full else config.rope
