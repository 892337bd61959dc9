"""EXAONE 4.0 (LG AI Research 2025): OLMo 2's order of norms with a norm on each head; where some layers have windows,
the others have no positions."""

from __future__ import annotations

from headrace.models import olmo2
from headrace.models.decoder import Attention, AttentionOptions, Decoder
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "exaone4",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "max_position_embeddings": 512,
    "sliding_window": 37,
    "sliding_window_pattern": 4,
}


class Layer(olmo2.PostNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        window = decoder.window(layer_id)
        rotates = window is not None or not has_windows(decoder)
        return Attention(decoder, name, layer_id, AttentionOptions(qk_norm_offset=0.0, window=window, rotates=rotates))


def has_windows(decoder: Decoder) -> bool:
    """Return whether there is a window: null in config.json is none, and without the key the class's default holds."""
    return decoder.config.values.get("sliding_window", decoder.default_window) is not None


class Model(olmo2.Model):
    Layer = Layer

    def default_layer_type(self, layer_id: int) -> str:
        if not has_windows(self):
            return "full_attention"
        pattern = self.config.values.get("sliding_window_pattern", 4)
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            is_last = layer_id == self.num_layers - 1
            return "full_attention" if is_last or pattern[layer_id % len(pattern)] == "G" else "sliding_attention"
        if isinstance(pattern, str):
            raise CheckpointError(
                f"config.json: sliding_window_pattern is {pattern!r:.80}, expected L and G, or a number"
            )
        return (
            "sliding_attention"
            if (layer_id + 1) % self.config.integer("sliding_window_pattern", 4)
            else "full_attention"
        )
