"""Drafts from every position of a text at once, as training and judging drafters need them.

A row of depth 0 follows the text. A row of depth d at anchor i is the d-th token drafted after the anchor: it attends
to the text's rows up to the anchor, and to the anchor's own rows of lesser depth. This is what a drafter computes when
it drafts at i (EAGLE-3's training-time test, arXiv 2503.01840, figure 6), for all i in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from model import MLP, Attention, Layer, LlamaShape, RMSNorm, causal_attention, rotary, rotate


@dataclass
class Memory:
    """Keys and values of one layer [rows, heads, length, dim], by depth; and the anchors that go on after depth 0."""

    anchors: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def attend(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
    """x [rows, length, inputs] are the rows of the next depth: of depth 0 all, then those of `memory.anchors`.

    The row of anchor i and depth d is at position i + d.
    """
    rows, length, _ = x.shape
    shape, depth = attention.shape, len(memory.keys)
    at = memory.anchors + depth if depth else torch.arange(length)
    cos, sin = cos[at].to(x.dtype), sin[at].to(x.dtype)
    q, k, v = (
        p(x).view(rows, length, -1, shape.head_dim).transpose(1, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    group = shape.num_attention_heads // shape.num_key_value_heads
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    memory.keys.append(k)
    memory.values.append(v)
    if depth == 0:
        y = causal_attention(q, k, v)
    else:
        q = q * shape.head_dim**-0.5
        of_text = memory.keys[0].shape[2]
        later = torch.arange(of_text) > memory.anchors[:, None]
        scores = [(q @ memory.keys[0].transpose(-1, -2)).masked_fill(later, float("-inf"))]
        scores += [(q * other).sum(-1, keepdim=True) for other in memory.keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        y = weights[..., :of_text] @ memory.values[0]
        for i, other in enumerate(memory.values[1:]):
            y = y + weights[..., of_text + i, None] * other
    return attention.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


def advance(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
    """A Llama layer over the rows of the next depth."""
    x = x + attend(layer.self_attn, layer.input_layernorm(x), cos, sin, memory)
    return x + layer.mlp(layer.post_attention_layernorm(x))


class WideAttention(Attention):
    """Attention whose projections read two states side by side (EAGLE-3)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape)
        kv = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv, bias=False)


class MidLayer(nn.Module):
    """EAGLE-3's decoder layer: attention over [embedding, feature], the feature as residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = WideAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
        wide = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        x = feature + attend(self.self_attn, wide, cos, sin, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Positions(nn.Module):
    """cos, sin of the target's rotary embedding, with room for drafts beyond its last position."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        cos, sin = rotary(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
