"""Rotary position embedding (Su et al. 2021, "RoFormer"): one table of angles, and the known ways to stretch it.

The table has a row for each position that may occur, made once when the model is loaded, so that the angle of a
position never depends on how long its sequence is. Called by the model files; `Ops.rope_store` turns the heads.

`dynamic` (NTK, u/emozilla 2023) has a base that grows with the sequence. Here position p takes the base of a
sequence of p + 1 tokens, at which it is first computed; `transformers` does the same when it decodes token by token,
but turns a long prompt as a whole by the base of its end. `longrope` (Ding et al. 2024) has two sets of factors: like
vLLM we take the long one for all positions if max_model_len exceeds the original context, else the short one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import RopeTable
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError

F32 = NDArray[np.float32]

MAX_TABLE_BYTES = 2**31


def make_rope_table(
    rope: ModelConfig, head_dim: int, max_positions: int, max_model_len: int, theta: float = 10000.0
) -> RopeTable:
    """cos and sin for positions 0 ... max_model_len - 1, each [max_model_len, P] float32; 2 * P numbers are turned.

    Raises `CheckpointError` for a rope_type that is not known.
    """
    frequencies, magnitude = frequencies_of(rope, head_dim, max_positions, max_model_len, theta)
    dim = 2 * frequencies.shape[-1]
    size = 2 * 4 * max_model_len * (dim // 2)
    if size > MAX_TABLE_BYTES:
        raise CheckpointError(
            f"config.json: {max_model_len} positions need a rope table of {size} bytes, at most {MAX_TABLE_BYTES} "
            "are allowed; set max_model_len"
        )
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
    # In float64, so that all libraries round to the same float32.
    wide = angles.astype(np.float64)
    return RopeTable((np.cos(wide) * magnitude).astype(np.float32), (np.sin(wide) * magnitude).astype(np.float32))


def pair_order(num_rows: int, head_dim: int, turned: int, first: int = 0) -> NDArray[np.int64]:
    """Return the order (`weights.Linear.orders`) of q or k in a checkpoint where `turned` rows of each head, from
    `first` on, lie in pairs that turn together, (2i, 2i + 1); the operators take the pairs (i, i + turned / 2)."""
    within_head = np.arange(head_dim)
    within_head[first : first + turned] = first + np.arange(turned).reshape(turned // 2, 2).T.ravel()
    order: NDArray[np.int64] = (np.arange(0, num_rows, head_dim)[:, None] + within_head).ravel()
    return order


def frequencies_of(
    rope: ModelConfig, head_dim: int, max_positions: int, max_model_len: int, theta: float = 10000.0
) -> tuple[F32, float]:
    """Return frequencies [P] (or [max_model_len, P] where they depend on the position), and the factor of cos and sin.

    Raises `CheckpointError` for a rope_type that is not known.
    """
    part = rope.number("partial_rotary_factor", 1.0)
    if rope.values.get("rope_type") == "proportional" and 0 < part <= 1:
        return _proportional(rope, rope.number("rope_theta", theta, low=1.0), head_dim, part), 1.0
    dim = int(head_dim * part)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise CheckpointError(f"config.json: rope turns {dim} of {head_dim} numbers of a head, expected an even part")
    base = rope.number("rope_theta", theta, low=1.0)
    kinds = {
        "default": _default,
        # The three positions of Qwen's vision models are the same for text.
        "mrope": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "su": _longrope,
    }
    frequencies: tuple[F32, float] = rope.choice("rope_type", kinds)(rope, base, dim, max_positions, max_model_len)
    return frequencies


def _proportional(rope: ModelConfig, base: float, head_dim: int, part: float) -> F32:
    """Gemma 4: all pairs of a head, of which only the first `part` turn."""
    frequencies = _frequencies(base, head_dim) / np.float32(rope.number("factor", 1.0, low=1e-6))
    frequencies[int(part * head_dim // 2) :] = 0
    return frequencies


def _exponents(dim: int) -> F32:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _frequencies(base: float, dim: int) -> F32:
    return np.float32(1.0) / np.float32(base) ** _exponents(dim)


def _default(rope: ModelConfig, base: float, dim: int, max_positions: int, max_model_len: int) -> tuple[F32, float]:
    return _frequencies(base, dim), 1.0


def _linear(rope: ModelConfig, base: float, dim: int, max_positions: int, max_model_len: int) -> tuple[F32, float]:
    return _frequencies(base, dim) / np.float32(rope.number("factor", low=1e-6)), 1.0


def _dynamic(rope: ModelConfig, base: float, dim: int, max_positions: int, max_model_len: int) -> tuple[F32, float]:
    if rope.values.get("alpha") is not None:  # Hunyuan's: one base for all positions
        return _frequencies(base * rope.number("alpha", low=1.0) ** (dim / (dim - 2)), dim), 1.0
    factor, original = rope.number("factor", low=1.0), rope.integer("original_max_position_embeddings", max_positions)
    lengths = np.maximum(np.arange(1, max_model_len + 1, dtype=np.float64), original)
    bases = base * ((factor * lengths / original) - (factor - 1)) ** (dim / (dim - 2))
    return (1.0 / bases[:, None] ** _exponents(dim).astype(np.float64)).astype(np.float32), 1.0


def _llama3(rope: ModelConfig, base: float, dim: int, max_positions: int, max_model_len: int) -> tuple[F32, float]:
    """Llama 3.1: high frequencies stay, low ones are divided by `factor`, and the ones between are blended."""
    factor = rope.number("factor", low=1e-6)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.integer("original_max_position_embeddings", max_positions)
    if high <= low:
        raise CheckpointError(f"config.json: high_freq_factor {high:g} must exceed low_freq_factor {low:g}")
    frequencies = _frequencies(base, dim)
    turns = original * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (frequencies * share + frequencies / factor * (1 - share)).astype(np.float32), 1.0


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's magnitude for a stretch by `factor`, section 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(rope: ModelConfig, base: float, dim: int, max_positions: int, max_model_len: int) -> tuple[F32, float]:
    """YaRN (Peng et al. 2023), sections 3.2 to 3.4."""
    original = rope.integer("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", max_positions / original, low=1e-6)
    fast, slow = rope.number("beta_fast", 32.0, low=1e-6), rope.number("beta_slow", 1.0, low=1e-6)

    def index_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(fast), index_of(slow)
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    frequencies = _frequencies(base, dim)

    one, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    magnitude = mscale(factor, one) / mscale(factor, all_dim) if one and all_dim else mscale(factor, 1.0)
    return (frequencies / factor * ramp + frequencies * (1 - ramp)).astype(np.float32), rope.number(
        "attention_factor", magnitude
    )


def _longrope(rope: ModelConfig, base: float, dim: int, max_positions: int, max_model_len: int) -> tuple[F32, float]:
    original = rope.integer("original_max_position_embeddings", max_positions, low=2)
    factor = rope.number("factor", max_positions / original, low=1e-6)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    stretch = rope.numbers("long_factor" if max_model_len > original else "short_factor", dim // 2)
    frequencies = (1.0 / (np.array(stretch, np.float32) * np.float32(base) ** _exponents(dim))).astype(np.float32)
    return frequencies, rope.number("attention_factor", magnitude)
