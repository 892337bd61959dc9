"""Layers of families with a state: the gated delta rule (Yang et al. 2024), and gated attention between such layers.

Knows `Ops` and `Weights` only. Called by the model files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Cache, Matrix, Rows
from headrace.backends.states import DeltaInputs, StateHeads
from headrace.models.decoder import Attention, Decoder
from headrace.models.weights import Linear, Weights
from headrace.protocol.errors import CheckpointError

MAX_HEAD_DIM = 4096


def conv_weight(
    weights: Weights, name: str, width: int, size: int, factors: NDArray[np.float32] | None = None
) -> Array:
    """The convolution `name` [width, 1, size] as `Ops.conv` takes it: [size, width], times `factors` [width]."""
    stored = weights.numbers(f"{name}.weight", (width, 1, size))[:, 0].T
    return weights.constant(np.ascontiguousarray(stored if factors is None else stored * factors))


class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of a gate. Each head's gate lies behind its query."""

    def make_qkv(self, weights: Weights, linear: Linear) -> Matrix:
        (queries, *others), size = linear.num_outs, self.heads.head_dim
        pairs = np.arange(2 * queries).reshape(-1, 2, size)
        # The gate goes first, so that query, key and value are neighbours.
        order = np.concatenate([pairs[:, 1].ravel(), pairs[:, 0].ravel()])
        outs = [2 * queries, *others]
        return weights.matrix(linear._replace(num_outs=outs, orders=[order, None, None], cut=None))

    def mix(self, qkv: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, width = self.ops, self.heads.num_heads * self.heads.head_dim
        gate, qkv = ops.columns(qkv, 0, width), ops.columns(qkv, width, self.qkv.num_out - width)
        return ops.linear(ops.multiply(self.attend(qkv, rows, kv), gate, "sigmoid"), self.out)


class GatedDelta:
    """Convolution of q, k and v, the gated delta rule, a norm of each head times the silu of a gate z.

    Families' subclasses read the matrices, which their checkpoints stack in different orders.
    """

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        weights, config = decoder.weights, decoder.config
        num_keys, num_values = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
        key_dim = config.integer("linear_key_head_dim", 128, high=MAX_HEAD_DIM)
        value_dim = config.integer("linear_value_head_dim", 128, high=MAX_HEAD_DIM)
        size = config.integer("linear_conv_kernel_dim", 4, low=2, high=64)
        if num_values % num_keys:
            raise CheckpointError(
                f"config.json: linear_num_value_heads {num_values} is no multiple of linear_num_key_heads {num_keys}"
            )
        if decoder.activation != "silu":
            raise CheckpointError(f"config.json: hidden_act is {decoder.activation}, expected silu")
        self.ops, self.layer_id, self.eps = decoder.ops, layer_id, decoder.eps
        self.heads = StateHeads(num_values, num_keys, key_dim, value_dim, config.flag("linear_heads_tiled", False))
        self.keys, self.values = num_keys * key_dim, num_values * value_dim
        width = 2 * self.keys + self.values
        decoder.keep_states(layer_id, (size - 1, width), (num_values, key_dim, value_dim))
        self.qkvz = self.make_qkvz(weights, name, decoder.hidden_size)
        self.ba = self.make_ba(weights, name, decoder.hidden_size)
        self.weight = conv_weight(weights, f"{name}.conv1d", width, size)
        self.steps = weights.constant(weights.numbers(f"{name}.dt_bias", (num_values,)))
        if weights.has(f"{name}.rates"):  # as GGUF files have them
            rates = weights.numbers(f"{name}.rates", (num_values,))
        else:
            rates = -np.exp(weights.numbers(f"{name}.A_log", (num_values,)))
        self.rates = weights.constant(rates)
        # q / sqrt(sum of squares + 1e-6) is a norm by the mean, times 1 / sqrt(key_dim).
        self.unit = weights.constant(np.full(key_dim, key_dim**-0.5, np.float32))
        self.norm = weights.tensor(f"{name}.norm.weight", (value_dim,))
        self.out = weights.matrix(Linear([f"{name}.out_proj"], self.values, [decoder.hidden_size]))

    def make_qkvz(self, weights: Weights, name: str, hidden: int) -> Matrix:
        names = [f"{name}.in_proj_qkv", f"{name}.in_proj_z"]
        return weights.matrix(Linear(names, hidden, [2 * self.keys + self.values, self.values]))

    def make_ba(self, weights: Weights, name: str, hidden: int) -> Matrix:
        num = self.heads.num_heads
        return weights.matrix(Linear([f"{name}.in_proj_b", f"{name}.in_proj_a"], hidden, [num, num], plain=True))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, heads, keys, num = self.ops, self.heads, self.keys, self.heads.num_heads
        past, memory = kv[self.layer_id].arrays
        width = 2 * keys + self.values
        qkvz, ba = ops.linear(x, self.qkvz), ops.linear(x, self.ba)
        mixed = ops.conv(ops.columns(qkvz, 0, width), self.weight, None, "silu", rows, past)
        qk = ops.rms_norm(
            ops.columns(mixed, 0, 2 * keys), self.unit, 1e-6 / heads.key_dim, heads=2 * heads.num_key_heads
        )
        decay = ops.softplus(ops.columns(ba, num, num), self.steps, self.rates)
        beta = ops.activation(ops.columns(ba, 0, num), "sigmoid")
        query, key, value = (
            ops.columns(qk, 0, keys),
            ops.columns(qk, keys, keys),
            ops.columns(mixed, 2 * keys, self.values),
        )
        inputs = DeltaInputs(query, key, value, decay, beta)
        y = ops.delta(inputs, heads, rows, memory, heads.key_dim**-0.5)
        y = ops.rms_norm(y, self.norm, self.eps, heads=num)
        return ops.linear(ops.multiply(y, ops.columns(qkvz, width, self.values), "silu"), self.out)
