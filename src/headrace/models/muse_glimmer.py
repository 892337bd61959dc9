"""Muse Glimmer's text (Meta 2026): Gemma 2's frame around gated attention, whose queries and keys have norms without a
weight, with windows in three of four layers and no positions in each fourth; the tower for images is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.base import Array, HeadNorm
from headrace.models import afmoe, gemma2
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder, RMSNorm
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "muse_glimmer",
    "text_config": {
        "model_type": "muse_glimmer_text",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "sliding_window": 37,
        "qk_scale_factor": 2.5,
        "output_multiplier": 1.3,
        "final_logit_softcapping": 15.0,
        "post_norm_eps": 1e-4,
        "max_position_embeddings": 512,
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 2,
    },
    "out_hidden_size": 64,
    "projector_hidden_size": 16,
}  # fmt: skip


def bases(decoder: Decoder) -> list[Any]:
    """Return for each layer 0 where nothing turns, else another number; the base is in the global rope's settings."""
    num, listed = decoder.num_layers, decoder.config.values.get("layer_rope_theta")
    if listed is None:
        return [(num - 1 - i) % 4 for i in range(num)]
    if not isinstance(listed, list) or len(listed) != num or not all(isinstance(base, int | float) for base in listed):
        raise CheckpointError(f"config.json: layer_rope_theta is {listed!r:.80}, expected a list of {num} numbers")
    return listed


class Layer(gemma2.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        config, window, size = decoder.config, decoder.window(layer_id), decoder.head_dim
        bias, scale = config.flag("attention_bias", False), config.number("qk_scale_factor", 3.87) * size**-0.5
        rotates = bases(decoder)[layer_id] != 0
        options = AttentionOptions(bias, bias, window=window, scale=scale, rotates=rotates)
        attention = afmoe.GatedAttention(decoder, name, layer_id, options)
        norm = HeadNorm(decoder.weights.constant(np.ones(size, np.float32)), decoder.eps, 0.0)
        attention.form = attention.form._replace(q_norm=norm, k_norm=norm)
        return attention


class Model(gemma2.Model):
    Layer = Layer
    default_activation = "silu"
    default_eps = 1e-5
    default_head_dim = 128
    default_tied = False
    default_window = 2048

    def default_layer_type(self, layer_id: int) -> str:
        return "sliding_attention" if (self.num_layers - 1 - layer_id) % 4 else "full_attention"

    def make_post_norm(self, name: str) -> RMSNorm:
        eps = self.config.number("post_norm_eps", 1e-8)
        return RMSNorm(self.weights, self.ops, name, self.hidden_size, eps, self.norm_offset)

    def make_final_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.weights, self.ops, name, self.hidden_size, self.eps)

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        self.logit_factor = config.number("output_multiplier", 26**-0.5)
        self.logit_cap = config.number("final_logit_softcapping", 20.0, low=1e-6)

    def embed(self, token_ids: Array) -> Array:
        return self.ops.rms_norm(self.ops.embedding(token_ids, self.embedding), None, self.eps)

    def logits(self, hidden: Array, rows: Array) -> Array:
        return self.ops.softcap(self.ops.scale(Decoder.logits(self, hidden, rows), self.logit_factor), self.logit_cap)
