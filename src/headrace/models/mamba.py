"""Mamba2 (Dao, Gu 2024), as several families have it: one projection, a convolution, a scan, a gated norm.

Knows `Ops` and `Weights` only. Called by the model files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.backends.base import Activation, Array, Cache, Rows
from headrace.backends.states import ScanInputs, StateHeads
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder
from headrace.models.recurrent import MAX_HEAD_DIM, conv_weight
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError


def heads_of(config: ModelConfig, names: tuple[str, str, str, str], inner: int | None = None) -> StateHeads:
    """Return the sizes under the keys `names`: heads, groups, state, numbers of a head ("auto": `inner` / heads)."""
    num_heads, num_groups = config.integer(names[0]), config.integer(names[1], 1)
    size, head_dim = config.integer(names[2], high=MAX_HEAD_DIM), config.values.get(names[3])
    if inner is not None and head_dim in (None, "auto"):
        head_dim = inner // num_heads
    elif inner is not None and config.integer(names[3]) * num_heads != inner:
        raise CheckpointError(f"config.json: {names[3]} is {head_dim!r:.80}, expected {inner} / {names[0]}")
    if num_heads % num_groups:
        raise CheckpointError(f"config.json: {names[0]} {num_heads} is no multiple of {names[1]} {num_groups}")
    return StateHeads(num_heads, num_groups, size, ModelConfig({names[3]: head_dim}).integer(names[3]))


def step_limits(config: ModelConfig) -> tuple[float, float]:
    """Return `time_step_limit`: the least and the greatest step, the latter perhaps infinite."""
    value: Any = config.values.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise CheckpointError(f"config.json: time_step_limit is {value!r:.80}, expected two numbers")
    low = ModelConfig({"time_step_limit": value[0]}).number("time_step_limit")
    # JSON has no infinity; some writers state it as an object or a word.
    high = float(value[1]) if isinstance(value[1], int | float) else math.inf
    if not high >= low:
        raise CheckpointError(f"config.json: time_step_limit is {value!r:.80}, expected two ascending numbers")
    return low, high


class MambaForm(NamedTuple):
    """The settings in which models' Mamba2 layers differ.

    limits: of the steps. norm_first: norm before gate; has_norm: False where there is only the gate. factors: of the
    five parts of the projection (gate, x, B, C, step). activation: of the convolution.
    """

    heads: StateHeads
    conv_size: int
    bias: bool
    conv_bias: bool
    limits: tuple[float, float]
    has_norm: bool = True
    norm_first: bool = False
    factors: Sequence[float] = (1.0,) * 5
    activation: Activation = "silu"


class Mamba2:
    """One projection gives gate, convolution's inputs and steps; the scan's result is gated, then normed by groups."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int, form: MambaForm) -> None:
        heads, conv_size, bias, conv_bias, limits, has_norm, norm_first, factors, activation = form
        weights, self.ops, self.layer_id, self.heads = decoder.weights, decoder.ops, layer_id, heads
        self.inner, self.keys = heads.num_heads * heads.value_dim, heads.num_key_heads * heads.key_dim
        self.width = self.inner + 2 * self.keys
        self.eps, self.limits, self.norm_first, self.kind = decoder.eps, limits, norm_first, activation
        decoder.keep_states(layer_id, (conv_size - 1, self.width), (heads.num_heads, heads.key_dim, heads.value_dim))
        total = self.inner + self.width + heads.num_heads
        self.into = weights.matrix(Linear([f"{name}.in_proj"], decoder.hidden_size, [total], bias=bias))
        # Factors of the convolution's inputs are applied to its weights.
        self.gate_factor, self.step_factor = factors[0], factors[4]
        by_column = np.repeat(np.array(factors[1:4], np.float32), [self.inner, self.keys, self.keys])
        self.weight = conv_weight(weights, f"{name}.conv1d", self.width, conv_size, by_column)
        self.bias = weights.constant(weights.numbers(f"{name}.conv1d.bias", (self.width,))) if conv_bias else None
        self.steps = weights.constant(weights.numbers(f"{name}.dt_bias", (heads.num_heads,)))
        if weights.has(f"{name}.rates"):  # as GGUF files have them
            rates = weights.numbers(f"{name}.rates", (heads.num_heads,))
        else:
            rates = -np.exp(weights.numbers(f"{name}.A_log", (heads.num_heads,)))
        self.rates = weights.constant(rates)
        self.skip = weights.constant(weights.numbers(f"{name}.D", (heads.num_heads,)))
        self.norm = weights.tensor(f"{name}.norm.weight", (self.inner,)) if has_norm else None
        self.out = weights.matrix(Linear([f"{name}.out_proj"], self.inner, [decoder.hidden_size], bias=bias))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, heads, inner, keys = self.ops, self.heads, self.inner, self.keys
        past, memory = kv[self.layer_id].arrays
        parts = ops.linear(x, self.into)
        mixed = self.convolved(ops.columns(parts, inner, self.width), rows, past)
        dt = self.scaled(ops.columns(parts, inner + self.width, heads.num_heads), self.step_factor)
        dt = ops.softplus(dt, self.steps, None, *self.limits)
        b, c = ops.columns(mixed, inner, keys), ops.columns(mixed, inner + keys, keys)
        inputs = ScanInputs(ops.columns(mixed, 0, inner), b, c, dt, self.rates, self.skip)
        y = ops.scan(inputs, heads, rows, memory)
        gate = self.scaled(ops.columns(parts, 0, inner), self.gate_factor)
        if self.norm_first:
            y = self.normed(y)
        y = ops.multiply(y, gate, "silu")
        return ops.linear(y if self.norm_first else self.normed(y), self.out)

    def convolved(self, x: Array, rows: Rows, past: Array) -> Array:
        """Return the convolution of x and its activation, in one operator if the activation is silu."""
        ops, is_silu = self.ops, self.kind == "silu"
        y = ops.conv(x, self.weight, self.bias, "silu" if is_silu else "identity", rows, past)
        return y if is_silu else ops.activation(y, self.kind)

    def scaled(self, x: Array, factor: float) -> Array:
        return x if factor == 1.0 else self.ops.scale(x, factor)

    def normed(self, y: Array) -> Array:
        if self.norm is None:
            return y
        return self.ops.rms_norm(y, self.norm, self.eps, heads=self.heads.num_key_heads)
