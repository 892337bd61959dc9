"""Gemma 4, text only (Google DeepMind 2026): Gemma 3 with a vector of each token for every layer (`gemma4_layers`)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import Array, Cache, Ops, RopeTable, Rows
from headrace.models import gemma2
from headrace.models.config import ModelConfig
from headrace.models.decoder import RMSNorm
from headrace.models.gemma4_layers import Layer
from headrace.models.rope import make_rope_table
from headrace.models.weights import Weights
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "gemma4_text",
    "vocab_size": 199,
    "vocab_size_per_layer_input": 199,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 20,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "global_head_dim": 20,
    "max_position_embeddings": 512,
    "sliding_window": 29,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


class Model(gemma2.Model):
    Layer = Layer  # type: ignore[assignment]
    norm_offset = 0.0
    default_window = 512

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        if config.values.get("use_bidirectional_attention") == "all":
            raise CheckpointError("config.json: use_bidirectional_attention is all; headrace runs causal models only")
        self.extra_width = width = config.integer("hidden_size_per_layer_input", 256, low=0)
        root, num = "model." if weights.has_prefix("model.") else "", self.num_layers
        if width:
            vocab = config.integer("vocab_size_per_layer_input", self.vocab_size)
            self.extra = weights.table(f"{root}embed_tokens_per_layer.weight", (vocab, num * width))
            self.to_extra = weights.linear([f"{root}per_layer_model_projection"], self.hidden_size, [num * width])
            self.extra_norm = RMSNorm(weights, ops, f"{root}per_layer_projection_norm", width, self.eps).of_head

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        by_type, longest = config.mapping("rope_parameters"), config.integer("max_position_embeddings")
        rope = ModelConfig(full | by_type.mapping("full_attention").values)
        size = self.sizes(self.num_layers - 1, is_full=True)[0]
        table = make_rope_table(rope, size, longest, self.max_model_len)
        self.full_rope_table = RopeTable(self.weights.constant(table.cos), self.weights.constant(table.sin))
        return ModelConfig({"rope_type": "default"} | by_type.mapping("sliding_attention").values)

    def sizes(self, layer_id: int, is_full: bool) -> tuple[int, int]:
        """Numbers of a head, and heads of keys: of the layer, else of its type."""
        config, size, kv_heads = self.config, self.head_dim, self.num_kv_heads
        if is_full:
            size = config.integer("global_head_dim", 512)
            if config.flag("attention_k_eq_v", False):
                kv_heads = config.integer("num_global_key_value_heads", kv_heads)
        layer = config.mapping("per_layer_config").mapping(str(layer_id))
        return layer.integer("head_dim", size), layer.integer("num_key_value_heads", kv_heads)

    def source(self, layer_id: int) -> int | None:
        """The layer that has the cache: of the last `num_kv_shared_layers` the last one of their type before them."""
        first = self.num_layers - self.config.integer("num_kv_shared_layers", 0, low=0, high=self.num_layers - 1)
        alike = [i for i in range(first) if self.layer_type(i) == self.layer_type(layer_id)]
        if layer_id >= first and not alike:
            raise CheckpointError(f"config.json: num_kv_shared_layers leaves layer {layer_id} no cache of its type")
        return alike[-1] if layer_id >= first else None

    def default_layer_type(self, layer_id: int) -> str:
        return "sliding_attention" if (layer_id + 1) % 6 and layer_id + 1 < self.num_layers else "full_attention"

    def forward(self, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None) -> Array:
        x, ops, width, extra = self.enter(rows), self.ops, self.extra_width, None
        if width:
            of_tokens = ops.embedding(rows.token_ids, self.extra, width**0.5)
            of_x = ops.scale(ops.linear(x, self.to_extra), self.hidden_size**-0.5)
            extra = ops.scale(ops.norm_columns(of_x, 0, self.num_layers, self.extra_norm) + of_tokens, 2**-0.5)
        for i, layer in enumerate(self.layers):
            if streams is not None:
                streams.append(x)
            x = layer(x, rows, kv, extra if extra is None else ops.columns(extra, i * width, width))  # type: ignore[call-arg]
        if streams is not None:
            streams.append(x)
        return x
