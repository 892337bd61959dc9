"""gpt-oss (OpenAI 2025): attention with sinks and alternating windows, and experts with biases and a clamped gate."""

from __future__ import annotations

import numpy as np

from headrace.backends.base import Array, ExpertLayer, Routing
from headrace.models.decoder import MAX_EXPERTS, Attention, AttentionOptions, Decoder, PreNormLayer
from headrace.models.unread import Alias
from headrace.models.weights import Expert, Linear
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "gpt_oss",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 37,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "truncate": False,
    },
}  # fmt: skip
ALPHA, LIMIT = 1.702, 7.0
"""The clamp of the gate in every release, and in the kernels."""


class Experts:
    """A mixture weighted by the softmax over the chosen experts. Rows of gate and up alternate in the checkpoint, whose
    matrices are [in, out] where they are floats."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        weights, config = decoder.weights, decoder.config
        hidden, inner = decoder.hidden_size, decoder.intermediate_size
        num = config.integer("num_local_experts", 128, high=MAX_EXPERTS)
        self.ops, routing = decoder.ops, Routing(config.integer("num_experts_per_tok", 4, high=num))
        router = weights.matrix(Linear([f"{name}.router"], hidden, [num], bias=True, plain=True))
        outs = [inner, inner]
        order = np.arange(2 * inner).reshape(inner, 2).T.ravel()
        names = [f"{name}.experts.{e}" for e in range(num)]
        if weights.has(f"{names[0]}.gate_proj.weight"):  # as GGUF files have them
            gate_up = [
                weights.matrix(
                    Linear([f"{n}.gate_proj", f"{n}.up_proj"], hidden, outs, bias=True, cut=Expert(e, num, outs))
                )
                for e, n in enumerate(names)
            ]
        else:
            gate_up = [
                weights.matrix(Linear(
                    [f"{n}.gate_up_proj"], hidden, [2 * inner], bias=True, transposed=True, orders=[order],
                    cut=Expert(e, num, outs),
                ))
                for e, n in enumerate(names)
            ]  # fmt: skip
        down = [
            weights.matrix(
                Linear([f"{n}.down_proj"], inner, [hidden], bias=True, transposed=True, cut=Expert(e, num, [hidden]))
            )
            for e, n in enumerate(names)
        ]

        self.layer = ExpertLayer(router, routing, gate_up, down, "clamped_swiglu")

    def __call__(self, x: Array) -> Array:
        return self.ops.experts(x, self.layer)


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias, window = decoder.config.flag("attention_bias", True), decoder.window(layer_id)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, window=window, sinks=True))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Experts:
        for key, expected in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
            if decoder.config.number(key, expected) != expected:
                raise CheckpointError(f"config.json: {key} is {decoder.config.values[key]!r:.80}, expected {expected}")
        return Experts(decoder, f"{name}.mlp")


class Model(Decoder):
    Layer = Layer
    unread = (Alias("num_experts", "num_local_experts"),)
    default_eps = 1e-5
    default_theta = 150_000.0
    default_window = 128
    default_head_dim = 64

    def default_layer_type(self, layer_id: int) -> str:
        return "full_attention" if layer_id % 2 else "sliding_attention"
