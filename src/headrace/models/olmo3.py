"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows in three of four layers, whose rope is not stretched."""

from __future__ import annotations

from headrace.models import olmo2
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder

TINY = {
    "model_type": "olmo3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 37,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


class Layer(olmo2.PostNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        window = decoder.window(layer_id)
        rope_table = decoder.local_rope_table if window and isinstance(decoder, Model) else None
        bias = decoder.config.flag("attention_bias", False)
        options = AttentionOptions(bias, bias, window=window, rope_table=rope_table)
        return olmo2.WideNormAttention(decoder, name, layer_id, options)


class Model(olmo2.Model):
    Layer = Layer
    default_theta = 500_000.0

    def default_layer_type(self, layer_id: int) -> str:
        return "sliding_attention" if (layer_id + 1) % 4 else "full_attention"

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        # The releases have one setting, for the layers without windows; transformers 5 writes one for each type.
        whole = config.rope
        by_type = config.mapping("rope_parameters")
        local = {"rope_type": "default", "rope_theta": whole.number("rope_theta", self.default_theta, low=1.0)}
        self.local_rope_table = self.make_rope_table(ModelConfig(local | by_type.mapping("sliding_attention").values))
        full = by_type.mapping("full_attention").values
        return ModelConfig({"rope_type": "default", **full}) if full else whole
