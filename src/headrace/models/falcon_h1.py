"""Falcon-H1 (TII 2025): attention and Mamba2 side by side in each layer, with constant factors on all their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.backends.base import Array, Cache, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder
from headrace.models.mamba import Mamba2, MambaForm, heads_of, step_limits
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "falcon_h1",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "max_position_embeddings": 512,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 0.6],
    "mlp_multipliers": [0.8, 0.6],
    "tie_word_embeddings": False,
}


def factors_of(config: ModelConfig, name: str, length: int) -> list[float]:
    return [1.0] * length if config.values.get(name) is None else config.numbers(name, length)


class MLP:
    """down(up(x) * act(factor * gate(x))) * factor."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        weights, hidden, inner = decoder.weights, decoder.hidden_size, decoder.intermediate_size
        bias = decoder.config.flag("mlp_bias", False)
        self.ops, self.kind = decoder.ops, decoder.activation
        self.gate = weights.matrix(Linear([f"{name}.gate_proj"], hidden, [inner], bias=bias))
        self.up = weights.matrix(Linear([f"{name}.up_proj"], hidden, [inner], bias=bias))
        self.down = weights.matrix(Linear([f"{name}.down_proj"], inner, [hidden], bias=bias))
        self.gate_factor, self.factor = factors_of(decoder.config, "mlp_multipliers", 2)

    def __call__(self, x: Array) -> Array:
        ops = self.ops
        gate = ops.scale(ops.linear(x, self.gate), self.gate_factor)
        return ops.scale(ops.linear(ops.multiply(ops.linear(x, self.up), gate, self.kind), self.down), self.factor)


class Layer:
    """x += attention(norm(x)) + mamba(norm(x)); x += mlp(norm(x)). The states lie behind the caches of all layers."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        config, self.ops = decoder.config, decoder.ops
        self.first_norm = decoder.make_norm(f"{name}.input_layernorm")
        bias = config.flag("attention_bias", False)
        # A factor of the keys is a factor of the scores.
        scale = decoder.head_dim**-0.5 * config.number("key_multiplier", 1.0)
        options = AttentionOptions(bias, bias, scale=scale)
        self.attention = Attention(decoder, f"{name}.self_attn", layer_id, options)
        names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head")
        inner = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * decoder.hidden_size)
        out_bias = config.flag("projectors_bias", False)
        bias = config.flag("mamba_proj_bias", False)
        if bias != out_bias:
            raise CheckpointError(f"config.json: projectors_bias is {out_bias}, expected mamba_proj_bias, {bias}")
        form = MambaForm(
            heads_of(config, names, inner), config.integer("mamba_d_conv", 4, low=2, high=64), bias=bias,
            conv_bias=config.flag("mamba_conv_bias", True), limits=step_limits(config),
            has_norm=config.flag("mamba_rms_norm", False), norm_first=config.flag("mamba_norm_before_gate", True),
            factors=factors_of(config, "ssm_multipliers", 5), activation=decoder.activation,
        )  # fmt: skip
        self.mamba = Mamba2(decoder, f"{name}.mamba", decoder.num_layers + layer_id, form)
        self.factors = [
            config.number(f"{part}_multiplier", 1.0) for part in ("attention_in", "attention_out", "ssm_in", "ssm_out")
        ]
        self.second_norm = decoder.make_norm(f"{name}.pre_ff_layernorm")
        self.mlp = MLP(decoder, f"{name}.feed_forward")

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, normed = self.ops, self.first_norm(x)
        attention_in, attention_out, ssm_in, ssm_out = self.factors
        x = x + ops.scale(self.attention(ops.scale(normed, attention_in), rows, kv), attention_out)
        x = x + ops.scale(self.mamba(ops.scale(normed, ssm_in), rows, kv), ssm_out)
        return x + self.mlp(self.second_norm(x))


class Model(Decoder):
    Layer: Callable[[Decoder, str, int], Layer] = Layer
    final_norm = "final_layernorm"
    default_eps = 1e-5

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        self.embedding_factor = config.number("embedding_multiplier", 1.0)
        self.logit_factor = config.number("lm_head_multiplier", 1.0)

    def embed(self, token_ids: Array) -> Array:
        return self.ops.embedding(token_ids, self.embedding, self.embedding_factor)

    def logits(self, hidden: Array, rows: Array) -> Array:
        return self.ops.scale(super().logits(hidden, rows), self.logit_factor)
