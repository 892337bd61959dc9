"""The shapes of models that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MODELS: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "l1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Llama-3.1-8B and Llama-3.2-1B."""

TOY = {
    "model_type": "llama", "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


RESERVE = 6 * 2**30
"""Bytes that are left for what a program computes with, for its graphs, and for what torch takes."""


class Layer(NamedTuple):
    """A kind of linear layer: its weights [num_out, num_in]; whether it is gated, has a residual, is the head."""

    name: str
    num_out: int
    num_in: int
    gated: bool = False
    residual: bool = False
    head: bool = False


def models(toy: bool) -> dict[str, dict[str, Any]]:
    return {"toy": TOY} if toy else MODELS


def layers(model: dict[str, Any]) -> list[Layer]:
    """Return the linear layers of a block, and the head."""
    hidden, inner, head_dim = model["hidden_size"], model["intermediate_size"], head_size(model)
    queries = model["num_attention_heads"] * head_dim
    return [
        Layer("qkv", queries + 2 * model["num_key_value_heads"] * head_dim, hidden),
        Layer("out", hidden, queries, residual=True),
        Layer("gate_up", 2 * inner, hidden, gated=True),
        Layer("down", hidden, inner, residual=True),
        Layer("head", model["vocab_size"], hidden, head=True),
    ]


def head_size(model: dict[str, Any]) -> int:
    return int(model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])


def num_weights(model: dict[str, Any]) -> tuple[int, int]:
    """Return the weights of the blocks' linear layers, and of the head."""
    *block, head = layers(model)
    return model["num_hidden_layers"] * sum(x.num_out * x.num_in for x in block), head.num_out * head.num_in


def batches_that_fit(model: dict[str, Any], batches: Sequence[int], positions: int, num_bytes: int) -> tuple[int, ...]:
    """Return those of `batches` sequences whose caches of so many positions fit into `num_bytes` beside the weights of
    16 bits and RESERVE; the least of them in any case."""
    blocks, head = num_weights(model)
    room = num_bytes - RESERVE - 2 * (blocks + head * (1 if model.get("tie_word_embeddings") else 2))
    return tuple(each for each in batches if each == min(batches) or each * positions * cache_bytes(model) <= room)


def cache_bytes(model: dict[str, Any], item_bytes: int = 2) -> int:
    """Return the bytes of a position's keys and values in all layers."""
    heads = model["num_hidden_layers"] * model["num_key_value_heads"]
    return int(2 * heads * head_size(model) * item_bytes)
