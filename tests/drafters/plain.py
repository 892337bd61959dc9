"""Drafters' forward passes in plain torch, after the papers and the published files: whole sequences, no cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, theta: float) -> Tensor:
    """x [heads, n, size]."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = torch.cos(angles), torch.sin(angles)
    left, right = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attention(x: Tensor, w: Weights, name: str, config: dict[str, Any]) -> Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads

    def part(kind: str, num: int) -> Tensor:
        result = linear(x, w, f"{name}.{kind}_proj").view(len(x), num, size)
        if f"{name}.{kind}_norm.weight" in w:
            result = rms(result, w[f"{name}.{kind}_norm.weight"], config["rms_norm_eps"])
        return result.transpose(0, 1)

    theta = config.get("rope_theta", 10000.0)
    q, k, v = rope(part("q", heads), theta), rope(part("k", kv_heads), theta), part("v", kv_heads)
    k, v = (one.repeat_interleave(heads // kv_heads, 0) for one in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
    return linear(mixed, w, f"{name}.o_proj")


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    result = x @ w[f"{name}.weight"].T
    return result + w[f"{name}.bias"] if f"{name}.bias" in w else result


def mlp(x: Tensor, w: Weights, name: str) -> Tensor:
    gate = torch.nn.functional.silu(linear(x, w, f"{name}.gate_proj"))
    return linear(gate * linear(x, w, f"{name}.up_proj"), w, f"{name}.down_proj")


def llama_layer(x: Tensor, w: Weights, name: str, config: dict[str, Any], first: bool = False) -> Tensor:
    eps = config["rms_norm_eps"]
    x = x + attention(x if first else rms(x, w[f"{name}.input_layernorm.weight"], eps), w, f"{name}.self_attn", config)
    return x + mlp(rms(x, w[f"{name}.post_attention_layernorm.weight"], eps), w, f"{name}.mlp")


def eagle1(features: Tensor, embedded: Tensor, w: Weights, config: dict[str, Any], head: Tensor) -> Any:
    """features [n, H] of the state, embedded [n, H] of the tokens after -> (next features, logits), [n, ...] each."""
    x = linear(torch.cat([embedded, features], -1), w, "fc")
    for i in range(config["num_hidden_layers"]):
        x = llama_layer(x, w, f"layers.{i}", config, first=i == 0)
    return x, x @ head.T


def eagle3(g: Tensor, embedded: Tensor, w: Weights, config: dict[str, Any], head: Tensor, name: str) -> Any:
    eps = config["rms_norm_eps"]
    normed = rms(g, w[f"{name}.hidden_norm.weight"], eps)
    u = torch.cat([rms(embedded, w[f"{name}.input_layernorm.weight"], eps), normed], -1)
    x = normed if config.get("norm_before_residual") else g
    x = x + attention(u, w, f"{name}.self_attn", config)
    x = x + mlp(rms(x, w[f"{name}.post_attention_layernorm.weight"], eps), w, f"{name}.mlp")
    for i in range(1, config["num_hidden_layers"]):
        x = llama_layer(x, w, f"layers.{i}", config)
    normed = rms(x, w["norm.weight"], eps)
    return (normed if config.get("norm_output") else x), normed @ head.T


def fused(features: Tensor, w: Weights, config: dict[str, Any]) -> Tensor:
    """EAGLE-3's features of several layers of the target, side by side -> g."""
    eps, size = config["rms_norm_eps"], config["hidden_size"]
    if config.get("norm_before_fc"):
        features = rms(features, w["input_norm.weight"], eps)
    if config.get("fc_norm"):
        parts = features.split(size, -1)
        features = torch.cat([rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
    return linear(features, w, "fc")


def mtp(state: Tensor, embedded: Tensor, w: Weights, config: dict[str, Any], head: Tensor, names: Any) -> Any:
    """`names`: (norm of the embedding, norm of the state, matrix, block, last norm, state first, feeds normed)."""
    of_embedding, of_state, matrix, block, last, state_first, feeds_normed = names
    eps = config["rms_norm_eps"]
    parts = [rms(embedded, w[f"{of_embedding}.weight"], eps), rms(state, w[f"{of_state}.weight"], eps)]
    x = linear(torch.cat(parts[::-1] if state_first else parts, -1), w, matrix)
    x = llama_layer(x, w, block, config)
    normed = rms(x, w[f"{last}.weight"], eps)
    return (normed if feeds_normed else x), normed @ head.T


def layer_tensors(name: str, config: dict[str, Any], wide: int = 1, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder layer whose attention reads `wide` vectors."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.self_attn.q_proj.weight": (heads * size, wide * hidden),
        f"{name}.self_attn.k_proj.weight": (kv, wide * hidden),
        f"{name}.self_attn.v_proj.weight": (kv, wide * hidden),
        f"{name}.self_attn.o_proj.weight": (hidden, heads * size),
        f"{name}.mlp.gate_proj.weight": (inner, hidden),
        f"{name}.mlp.up_proj.weight": (inner, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, inner),
        f"{name}.input_layernorm.weight": (hidden,),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }
    if bias:
        shapes |= {f"{name}.self_attn.{p}_proj.bias": (n,) for p, n in (("q", heads * size), ("k", kv), ("v", kv))}
    return shapes


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        result[name] = 1 + 0.2 * noise if "norm" in name else noise * (1.2 / math.sqrt(shape[-1]))
    return result
