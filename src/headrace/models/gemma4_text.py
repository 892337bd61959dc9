"""Gemma 4, text only (Google DeepMind 2026): Gemma 3 with a vector of each token for every layer (`gemma4_layers`)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import Array, Cache, Rows
from headrace.models.gemma4_layers import Frame, Layer

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


class Model(Frame):
    Layer = Layer  # type: ignore[assignment]

    def through(
        self, layer_ids: range, x: Array, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None
    ) -> Array:
        ops, width, extra = self.ops, self.extra_width, None
        if width:
            # Computed from the tokens alone, so that a process with later layers computes it by itself.
            entered = self.enter(rows) if layer_ids.start else x
            of_tokens = ops.embedding(rows.token_ids, self.extra, width**0.5)
            of_x = ops.scale(ops.linear(entered, self.to_extra), self.hidden_size**-0.5)
            extra = ops.scale(ops.norm_columns(of_x, 0, self.num_layers, self.extra_norm) + of_tokens, 2**-0.5)
        for i in layer_ids:
            if streams is not None:
                streams.append(x)
            x = self.layers[i](x, rows, kv, extra if extra is None else ops.columns(extra, i * width, width))  # type: ignore[call-arg]
        if streams is not None:
            streams.append(x)
        return x
