"""Layers with a recurrent state: their operators, which are a part of `base.Ops`, and their shapes.

A state is float32. It advances row by row in the order of positions, in prefill as in decode: there is one form, so no
cut of a sequence changes a bit of it (ADR 0028). Called by the model files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

Array: TypeAlias = Any
"""As in `base`, which knows this module."""

State: TypeAlias = Any
"""An array of one layer's states, float32 [slots, ...]."""


@dataclass(frozen=True, slots=True, eq=False)
class StateCache:
    """The states of one layer: arrays float32 [slots, ...]."""

    kind: int
    arrays: tuple[State, ...]


class StateHeads(NamedTuple):
    """Heads of a layer with a state: value head h goes with key head h // (num_heads // num_key_heads), or if they are
    `tiled` with key head h % num_key_heads."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False


class DeltaInputs(NamedTuple):
    """query and key [R, key heads * key_dim], value [R, heads * value_dim], beta [R, heads]; decay [R, heads], or
    [R, heads * key_dim] with a number for each channel (KDA, arXiv 2510.26692)."""

    query: Array
    key: Array
    value: Array
    decay: Array
    beta: Array


class ScanInputs(NamedTuple):
    """x [R, heads * value_dim], b and c [R, key heads * key_dim], dt [R, heads], a and d [heads]."""

    x: Array
    b: Array
    c: Array
    dt: Array
    a: Array
    d: Array | None = None


class RecurrentOps(Protocol):
    """R rows, W width, K size of a kernel. `rows` are `base.Rows`."""

    def softplus(
        self, x: Array, bias: Array, factor: Array | None = None, low: float = 0.0, high: float = math.inf
    ) -> Array:
        """log(1 + exp(x [R, W] + bias [W])), held in [low, high], times factor [W]; in float32."""
        ...

    def conv(
        self, x: Array, weight: Array, bias: Array | None, kind: Literal["silu", "identity"], rows: Any, state: State
    ) -> Array:
        """Causal convolution of each column of x [R, W] over the rows of its sequence, by weight [K, W], then act.

        `kind` is silu or identity. state: [slots, K - 1, W], the last inputs, the oldest first.
        """
        ...

    def delta(self, inputs: DeltaInputs, heads: StateHeads, rows: Any, state: State, scale: float) -> Array:
        """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) -> [R, heads * value_dim].

        Of each head S [key_dim, value_dim]: S *= exp(decay); S += key (beta * (value - key S)); scale * query S.
        state: [slots, heads, key_dim, value_dim].
        """
        ...

    def scan(self, inputs: ScanInputs, heads: StateHeads, rows: Any, state: State) -> Array:
        """Mamba2's recurrence (Dao, Gu 2024, arXiv 2405.21060) -> [R, heads * value_dim].

        Of each head S [key_dim, value_dim]: S = S * exp(dt * a) + b (dt * x); c S + d * x. state as in `delta`.
        """
        ...
