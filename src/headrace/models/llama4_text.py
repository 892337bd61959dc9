"""The text of Llama 4 (Meta 2025): attention within chunks, except in layers without positions, whose queries grow with
their position; experts whose input is scaled, and one that all rows share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.backends.base import Array, ExpertLayer, HeadNorm, RopeTable, Routing
from headrace.models.config import ModelConfig
from headrace.models.decoder import (
    MAX_EXPERTS,
    Attention,
    AttentionOptions,
    Decoder,
    GatedMLP,
    PreNormLayer,
    SharedExperts,
)
from headrace.models.ministral3 import query_scale
from headrace.models.smollm3 import has_rope
from headrace.models.weights import Expert, Linear
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "llama4_text",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 40,
    "intermediate_size_mlp": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1, 1],
    "attention_chunk_size": 37,
    "floor_scale": 20,
    "attn_scale": 0.4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


class Experts:
    """A mixture whose scores, sigmoids, multiply an expert's input. Matrices are [in, out] in the checkpoint."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        weights, config = decoder.weights, decoder.config
        hidden, inner = decoder.hidden_size, decoder.intermediate_size
        num = config.integer("num_local_experts", 16, high=MAX_EXPERTS)
        top_k = config.integer("num_experts_per_tok", 1, high=num)
        self.ops = decoder.ops
        routing = Routing(top_k, "sigmoid", renormalise=False, scale_input=True)
        router = weights.matrix(Linear([f"{name}.router"], hidden, [num], plain=True))
        names, outs = [f"{name}.experts.{e}" for e in range(num)], [inner, inner]
        if weights.has(f"{names[0]}.gate_proj.weight"):  # as GGUF files have them
            gate_up = [
                weights.matrix(Linear([f"{n}.gate_proj", f"{n}.up_proj"], hidden, outs, cut=Expert(e, num, outs)))
                for e, n in enumerate(names)
            ]
        else:
            gate_up = [
                weights.matrix(
                    Linear([f"{n}.gate_up_proj"], hidden, [2 * inner], transposed=True, cut=Expert(e, num, outs))
                )
                for e, n in enumerate(names)
            ]
        down = [
            weights.matrix(Linear([f"{n}.down_proj"], inner, [hidden], transposed=True, cut=Expert(e, num, [hidden])))
            for e, n in enumerate(names)
        ]

        self.layer = ExpertLayer(router, routing, gate_up, down, decoder.activation)

    def __call__(self, x: Array) -> Array:
        return self.ops.experts(x, self.layer)


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        config = decoder.config
        bias, rotates = config.flag("attention_bias", False), has_rope(decoder, layer_id)
        window, scale = decoder.window(layer_id), None
        if not rotates and config.flag("attn_temperature_tuning", True):
            times = (np.arange(decoder.max_model_len) + 1) // config.integer("floor_scale", 8192)
            scale = query_scale(decoder, 1 + config.number("attn_scale", 0.1) * np.log1p(times))
        attention = Attention(
            decoder,
            name,
            layer_id,
            AttentionOptions(
                bias, bias, window=window, chunked=window is not None, rotates=rotates, paired=True, query_scale=scale
            ),
        )
        if rotates and config.flag("use_qk_norm", True):
            # The model norms after the rope; the order does not matter, because the rope changes no length.
            ones = decoder.weights.constant(np.ones(decoder.head_dim, np.float32))
            norm = HeadNorm(ones, decoder.eps, 0.0)
            attention.form = attention.form._replace(q_norm=norm, k_norm=norm)
        return attention

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        name = f"{name}.feed_forward"
        if not has_experts(decoder, layer_id):
            return GatedMLP(decoder, name, inner=decoder.config.integer("intermediate_size_mlp", 16384))
        return SharedExperts(Experts(decoder, name), GatedMLP(decoder, f"{name}.shared_expert"))


def has_experts(decoder: Decoder, layer_id: int) -> bool:
    listed = decoder.config.values.get("moe_layers")
    if listed is None:
        return (layer_id + 1) % decoder.config.integer("interleave_moe_layer_step", 1) == 0
    if not isinstance(listed, list):
        raise CheckpointError(f"config.json: moe_layers is {listed!r:.80}, expected a list of layers")
    return layer_id in listed


class Model(Decoder):
    Layer = Layer
    default_eps = 1e-5
    default_theta = 500_000.0
    default_window = 8192

    def window(self, layer_id: int) -> int | None:
        """Return the number of positions of a chunk, None for layers that see all."""
        kinds = self.config.words("layer_types", self.num_layers)
        kind = kinds[layer_id] if kinds else "chunked_attention" if has_rope(self, layer_id) else "full_attention"
        if kind not in ("chunked_attention", "full_attention"):
            raise CheckpointError(
                f"config.json: layer_types has {kind!r:.80}, expected full_attention or chunked_attention"
            )
        size = self.config.values.get("attention_chunk_size", self.default_window)
        if kind == "full_attention" or size is None:
            return None
        return self.config.integer("attention_chunk_size", self.default_window)

    def make_rope_table(self, rope: ModelConfig) -> RopeTable:
        # A stretched rope multiplies cos and sin; the norm of queries and keys after the rope would undo that.
        if self.config.flag("use_qk_norm", True):
            rope = ModelConfig(rope.values | {"attention_factor": 1.0})
        return super().make_rope_table(rope)
