"""The reference operators, one method each; see `backends.base.Ops` for their meaning and shapes.

Additions, multiplications, divisions and square roots are exactly rounded, so they run over all rows at once; products,
sums and transcendental functions go through `rowwise`, which keeps rows apart. Knows no models. Called by `models`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.base import Activation, Matrix, Rows
from headrace.backends.torch_ref import attention as paged
from headrace.backends.torch_ref.rowwise import elementwise, padded, products, row_sums
from headrace.quant.base import QWeight

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class RefMatrix:
    """A linear layer: `data` [padded in, padded out] float32, so that a product walks along it; `bias` [out]."""

    data: Tensor
    bias: Tensor | None
    num_in: int
    num_out: int

    def dense(self) -> Tensor:
        return self.data[: self.num_in, : self.num_out].t().contiguous()


class RefOps:
    """`Ops` in plain torch. Values between operators have `dtype`; within an operator they are float32."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def matrix(self, weights: Sequence[QWeight], bias: Tensor | None = None) -> RefMatrix:
        num_in = weights[0].shape[1]
        num_out = sum(w.shape[0] for w in weights)
        data = torch.zeros(padded(num_in), padded(num_out), device=self.device)
        column = 0
        for weight in weights:
            dense = weight.dequantize().to(self.device, self.dtype)
            # Turned some rows at a time, in the cache: one copy of all is several times slower.
            for part in torch.split(dense, 512):
                data[:num_in, column : column + part.shape[0]] = part.float().t().contiguous()
                column += part.shape[0]
        return RefMatrix(data, None if bias is None else bias.to(self.device, self.dtype).float(), num_in, num_out)

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        if not isinstance(matrix, RefMatrix):
            raise TypeError(f"a matrix of another backend: {type(matrix).__name__}")
        a = x.float()
        if matrix.data.shape[0] != matrix.num_in:
            a = F.pad(a, (0, matrix.data.shape[0] - matrix.num_in))
        out = products(a.unsqueeze(1), matrix.data.expand(x.shape[0], -1, -1)).squeeze(1)[:, : matrix.num_out]
        if matrix.bias is not None:
            out = out + matrix.bias
        return out.to(self.dtype)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        x = x.float()
        mean = row_sums(x * x) / x.shape[-1]
        gain = weight.float() + offset if offset else weight.float()
        return (x / torch.sqrt(mean + eps) * gain).to(self.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.float()
        x = x - row_sums(x) / x.shape[-1]
        variance = row_sums(x * x) / x.shape[-1]
        return (x / torch.sqrt(variance + eps) * weight.float() + bias.float()).to(self.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        left, right = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = [left * cos - right * sin, right * cos + left * sin]
        if 2 * half < x.shape[-1]:
            turned.append(x[..., 2 * half :].float())
        return torch.cat(turned, dim=-1).to(self.dtype)

    def store(self, key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        slots = cache.view(2, -1, *cache.shape[3:])
        slots[0].index_copy_(0, slot_mapping, key.to(cache.dtype))
        slots[1].index_copy_(0, slot_mapping, value.to(cache.dtype))

    def attention(
        self, query: Tensor, cache: Tensor, rows: Rows, scale: float, window: int | None = None, softcap: float = 0.0
    ) -> Tensor:
        return paged.attention(query, cache, rows, scale, window, softcap).to(self.dtype)

    def activation(self, x: Tensor, kind: Activation) -> Tensor:
        return elementwise(ACTIVATIONS[kind], x.float()).to(self.dtype)

    def gated(self, x: Tensor, kind: Activation) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (elementwise(ACTIVATIONS[kind], gate) * up).to(self.dtype)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return elementwise(torch.tanh, x / cap) * cap

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        # A stable sort gives equal logits to the lower expert id; softmax over the chosen is the renormalised one.
        best, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        best, ids = best[:, :top_k], ids[:, :top_k]
        weights = elementwise(torch.exp, best - best[:, :1])
        return weights / row_sums(weights), ids

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        kind: Activation,
    ) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert_id in sorted(set(ids.flatten().tolist())):
            row, place = (ids == expert_id).nonzero(as_tuple=True)
            made = self.linear(self.gated(self.linear(x[row], gate_up[expert_id]), kind), down[expert_id])
            out[row] += made.float() * weights[row, place].unsqueeze(1)
        return out.to(self.dtype)

    def copy_blocks(self, cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            cache[:, :, target] = cache[:, :, source]
