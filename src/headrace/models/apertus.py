"""Apertus (Swiss AI Initiative 2025): Llama with a norm on each head of q and k, and xIELU with learned factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.backends.base import Activation, Array, Cache, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import MLP, Attention, AttentionOptions, Decoder
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "apertus",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
"""Rope where config.json has none."""
XIELU: dict[str, Activation] = {"xielu": "identity"}
"""The kind that `Ops.activation` would take; xIELU has its own operator, `Ops.xielu`, which `XieluMLP` calls."""


class XieluMLP(MLP):
    """down(xielu(up(x))). xIELU's factors are the softplus of learned numbers; beta is added to the negative side's."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        super().__init__(decoder, name)
        self.beta, alpha_p, alpha_n = (
            number_of(decoder, f"{name}.act_fn", layer_id, part) for part in ("beta", "alpha_p", "alpha_n")
        )
        self.positive, self.negative = softplus(alpha_p), self.beta + softplus(alpha_n)
        if "xielu_beta" not in decoder.config.values:
            # A bound just below zero for exp's argument, too close to zero to change a float32 result.
            decoder.weights.numbers(f"{name}.act_fn.eps", ())

    def activate(self, x: Array) -> Array:
        return self.ops.xielu(x, self.positive, self.negative, self.beta)


def number_of(decoder: Decoder, name: str, layer_id: int, part: str) -> float:
    """Return a number of the activation: from a tensor, or for a GGUF file from a list in the config."""
    listed = decoder.config.values.get(f"xielu_{part}")
    if listed is None:
        return float(decoder.weights.numbers(f"{name}.{part}", () if part == "beta" else (1,)).item())
    if not isinstance(listed, list) or len(listed) != decoder.num_layers:
        raise CheckpointError(f"config.json: xielu_{part} must be a list of {decoder.num_layers} numbers")
    return ModelConfig({"number": listed[layer_id]}).number("number", low=-1e30)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        bias = decoder.config.flag("attention_bias", False)
        self.attention_norm = decoder.make_norm(f"{name}.attention_layernorm")
        options = AttentionOptions(bias, bias, qk_norm_offset=0.0)
        self.attention = Attention(decoder, f"{name}.self_attn", layer_id, options)
        self.mlp_norm = decoder.make_norm(f"{name}.feedforward_layernorm")
        self.mlp = XieluMLP(decoder, f"{name}.mlp", layer_id)

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.attention(self.attention_norm(x), rows, kv)
        return x + self.mlp(self.mlp_norm(x))


class Model(Decoder):
    Layer = Layer
    activations = XIELU
    default_activation = "xielu"
    default_theta = 12_000_000.0
    default_eps = 1e-5

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        has_rope = config.values.get("rope_parameters") or config.values.get("rope_scaling")
        return config.rope if has_rope else ModelConfig(LLAMA3)
