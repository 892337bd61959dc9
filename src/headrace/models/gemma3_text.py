"""Gemma 3, text only (Gemma Team 2025): Gemma 2 with q/k norms for soft caps, and a second rope. With
`use_bidirectional_attention` it is an encoder, EmbeddingGemma (Vera et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.backends.base import Array, LayerShape
from headrace.models import gemma2
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, Decoder
from headrace.models.unread import Rules

if TYPE_CHECKING:
    from headrace.backends.base import Matrix, Ops
    from headrace.models.weights import Weights

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
        attention = gemma2.make_attention(decoder, name, layer_id, 1.0, rope_table)
        if decoder.both_ways:
            window = decoder.window(layer_id)
            ahead = decoder.max_model_len if window is None else window - 1
            attention.scoring = attention.scoring._replace(ahead=ahead)
        return attention


class Model(gemma2.Model):
    Layer = Layer
    unread: Rules = ()
    default_theta = 1_000_000.0

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        self.both_ways = config.flag("use_bidirectional_attention", False)
        super().measure(config, weights, ops, max_model_len)

    def window(self, layer_id: int) -> int | None:
        """Of both ways the config's window is divided among the two sides of a row."""
        window = super().window(layer_id)
        return window // 2 + 1 if self.both_ways and window is not None else window

    def keep(self, layer_id: int, shape: LayerShape, window: int | None) -> None:
        super().keep(layer_id, shape, None if self.both_ways else window)

    def read_ends(self, root: str) -> tuple[Array, Matrix]:
        if not self.both_ways:
            return super().read_ends(root)
        table = self.weights.table(f"{root}{self.table}.weight", (self.vocab_size, self.hidden_size))
        return table, table  # an encoder has no head

    def logits(self, hidden: Array, rows: Array) -> Array:
        """Of both ways the vectors themselves: nothing is drawn from an encoder."""
        return self.final(hidden, rows) if self.both_ways else super().logits(hidden, rows)

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
