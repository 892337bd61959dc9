"""Llama in plain PyTorch, which can be trained, with the parameter names of Hugging Face's `LlamaForCausalLM`.

The engine's own model files run on operators that have no gradients. Called by `quantize.training`, and by the scripts
that train the built-in model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """cos, sin [max_position_embeddings, head_dim], rotate-half layout."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequencies)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor, span: int = 256) -> Tensor:
    """Queries in spans, each against the keys up to its end. In bfloat16 on a CPU this trains three times as fast as
    `scaled_dot_product_attention`, whose backward pass is slow there."""
    length, parts = q.shape[2], []
    q = q * q.shape[-1] ** -0.5
    for start in range(0, length, span):
        end = min(start + span, length)
        future = torch.full((end - start, end), float("-inf"), dtype=q.dtype, device=q.device).triu(start + 1)
        scores = q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2) + future
        parts.append(scores.softmax(-1) @ v[:, :, :end])
    return torch.cat(parts, 2)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_rows, length, _ = x.shape
        q, k, v = (
            p(x).view(num_rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y: Tensor = self.o_proj(causal_attention(q, k, v).transpose(1, 2).reshape(num_rows, length, -1))
        return y


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, tied: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = None if tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        cos, sin = rotary(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [rows, length] -> the last states, after the norm [rows, length, hidden]."""
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        y: Tensor = self.norm(x)
        return y

    def forward(self, ids: Tensor) -> Tensor:
        """ids [rows, length] -> logits [rows, length, vocab]."""
        return F.linear(self.hidden(ids), self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)
