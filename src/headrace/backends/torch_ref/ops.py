"""The reference operators, one method each; see `backends.base.Ops` for their meaning and shapes.

Additions, multiplications, divisions and square roots are exactly rounded, so they run over all rows at once; products,
sums and transcendental functions go through `rowwise`, which keeps rows apart. Knows no models. Called by `models`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.base import (
    Activation,
    ExpertLayer,
    HeadForm,
    HeadNorm,
    Heads,
    Matrix,
    RopeTable,
    Routing,
    Scoring,
)
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.torch_ref import attention as paged
from headrace.backends.torch_ref import recurrent
from headrace.backends.torch_ref.adapters import RefAdapters
from headrace.backends.torch_ref.batch import ForwardBatch
from headrace.backends.torch_ref.cache import LayerCache
from headrace.backends.torch_ref.rounded import e4m3_rows
from headrace.backends.torch_ref.rowwise import elementwise, padded, products, row_sums
from headrace.backends.torch_ref.tensors import tensor
from headrace.quant.base import Inputs, MatrixSource
from headrace.quant.schemes import Scheme

SLAB = 512
"""Rows of a matrix that are read from its source at once."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}


@dataclass(frozen=True, slots=True, eq=False)
class RefMatrix:
    """A linear layer: `data` [padded in, padded out] float32, so that a product walks along it; `bias` [out]."""

    data: Tensor
    bias: Tensor | None
    num_in: int
    num_out: int
    name: str = ""
    scheme: Scheme | None = None
    inputs: tuple[tuple[int, Inputs], ...] = ()
    """(outputs, rounding of the inputs) of each stacked layer with rounded inputs."""

    def dense(self) -> Tensor:
        return self.data[: self.num_in, : self.num_out].t().contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class RefStack:
    """Linear layers of different forms over the same inputs, whose outputs lie one after the other."""

    name: str
    parts: tuple[RefMatrix, ...]

    @property
    def num_in(self) -> int:
        return self.parts[0].num_in

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])


class RefOps:
    """`Ops` in plain torch. Values between operators have `dtype`; within an operator they are float32."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.weight_bytes = 0
        """Of all matrices, as the checkpoint would hold them in `dtype`."""
        self.matrices: list[RefMatrix | RefStack] = []
        self.adapters: RefAdapters | None = None
        self.rounds_inputs = False
        """Whether inputs of weights of 8-bit floats are rounded to E4M3: as the checkpoint says, else by row."""

    def matrix(self, source: MatrixSource, bias: Tensor | None = None) -> RefMatrix:
        num_in, num_out = source.num_in, source.num_out
        data = torch.zeros(padded(num_in), padded(num_out), device=self.device)
        # Turned some rows at a time, in the cache: one copy of all is several times slower.
        for first in range(0, num_out, SLAB):
            last = min(first + SLAB, num_out)
            part = tensor(source.slab(first, last).dequantize()).to(self.device)
            if source.scheme.kind != "f8":  # whose products have float32's scales in them
                part = part.to(self.dtype)
            data[:num_in, first:last] = part.float().t().contiguous()
        self.weight_bytes += num_in * num_out * self.dtype.itemsize
        bias = None if bias is None else bias.to(self.device, self.dtype).float()
        inputs: tuple[tuple[int, Inputs], ...] = ()
        if source.scheme.kind == "f8":
            inputs = tuple((size, each or Inputs()) for size, each in source.inputs)
        matrix = RefMatrix(data, bias, num_in, num_out, source.name, source.scheme, inputs)
        self.matrices.append(matrix)
        return matrix

    def parts(self) -> Iterator[RefMatrix]:
        """Yield each matrix of one form."""
        for matrix in self.matrices:
            yield from matrix.parts if isinstance(matrix, RefStack) else (matrix,)

    def stacked(self, name: str, matrices: Sequence[Matrix]) -> RefStack:
        parts = tuple(matrix for matrix in matrices if isinstance(matrix, RefMatrix))
        self.matrices = [matrix for matrix in self.matrices if matrix not in parts]
        stack = RefStack(name, parts)
        self.matrices.append(stack)
        return stack

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        out = self._linear(x, matrix)
        if self.adapters is not None:
            out = self.adapters.added(x, matrix, out)
        return out.to(self.dtype)

    def _linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        """The product as float32, without adapters."""
        if isinstance(matrix, RefStack):
            return torch.cat([self._linear(x, part) for part in matrix.parts], dim=1)
        if not isinstance(matrix, RefMatrix):
            raise TypeError(f"a matrix of another backend: {type(matrix).__name__}")
        a = x.float()
        if self.rounds_inputs and matrix.inputs:
            # Each stacked layer may have its own scale.
            by_inputs = {each: self._product(e4m3_rows(a, each), matrix) for _, each in matrix.inputs}
            ends = itertools.accumulate(size for size, _ in matrix.inputs)
            parts = [
                by_inputs[each][:, end - size : end] for (size, each), end in zip(matrix.inputs, ends, strict=True)
            ]
            out = torch.cat(parts, 1)
        else:
            out = self._product(a, matrix)
        if matrix.bias is not None:
            out = out + matrix.bias
        return out

    def _product(self, a: Tensor, matrix: RefMatrix) -> Tensor:
        """a [R, in] float32 times the weights: [R, out] float32."""
        if matrix.data.shape[0] != matrix.num_in:
            a = F.pad(a, (0, matrix.data.shape[0] - matrix.num_in))
        return products(a.unsqueeze(1), matrix.data.expand(a.shape[0], -1, -1)).squeeze(1)[:, : matrix.num_out]

    def by_head(self, x: Tensor, matrices: Sequence[Matrix], tail: int = 0) -> Tensor:
        heads = x.reshape(len(x), len(matrices), -1)
        width = heads.shape[2] - tail
        parts = []
        for head, matrix in enumerate(matrices):
            parts += [self.linear(heads[:, head, :width], matrix), heads[:, head, width:]]
        return torch.cat(parts, dim=1)

    def embedding(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        x = table.index_select(0, ids)
        # The factor is rounded to the model's dtype, as in training.
        return x if scale == 1.0 else x * x.new_tensor(scale)

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, heads: int = 1) -> Tensor:
        x = x.float()
        if heads > 1:
            by_head = x.reshape(len(x), heads, -1)
            if weight is not None and weight.numel() == x.shape[1]:
                weight = weight.view(heads, -1)
            return self.rms_norm(by_head, weight, eps, offset).flatten(1)
        mean = row_sums(x * x) / x.shape[-1]
        if weight is None:
            return (x / torch.sqrt(mean + eps)).to(self.dtype)
        gain = weight.float() + offset if offset else weight.float()
        return (x / torch.sqrt(mean + eps) * gain).to(self.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
        x = x.float()
        x = x - row_sums(x) / x.shape[-1]
        variance = row_sums(x * x) / x.shape[-1]
        y = x / torch.sqrt(variance + eps) * (weight.float() + offset if offset else weight.float())
        return (y if bias is None else y + bias.float()).to(self.dtype)

    def norm_columns(self, x: Tensor, first: int, num: int, norm: HeadNorm) -> Tensor:
        last = first + num * len(norm.weight)
        pieces = x[:, first:last].reshape(len(x), num, -1)
        return torch.cat([x[:, :first], self.rms_norm(pieces, *norm).flatten(1), x[:, last:]], dim=1)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
        """Turn 2 * P of D numbers in each head, from `first` on: x [R, heads, D], cos and sin [R, P]; pairs are
        (first + i, first + i + P)."""
        half = cos.shape[-1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        sizes = [first, half, half, x.shape[-1] - first - 2 * half]
        before, left, right, behind = torch.split(x.float(), sizes, dim=-1)
        parts = [before, left * cos - right * sin, right * cos + left * sin, behind]
        return torch.cat(parts, dim=-1).to(self.dtype)

    def turned(self, x: Tensor, rows: ForwardBatch, rope_table: RopeTable) -> Tensor:
        """x [R, heads, D] turned by the rows' positions."""
        return self.turn(x, *self.angles(rows, rope_table), rope_table.first)

    def rope(self, x: Tensor, num_heads: int, head_dim: int, rows: ForwardBatch, rope_table: RopeTable) -> Tensor:
        width = num_heads * head_dim
        heads = x[:, :width].reshape(len(x), num_heads, head_dim)
        return torch.cat([self.turned(heads, rows, rope_table).flatten(1), x[:, width:]], dim=1)

    def angles(self, rows: ForwardBatch, rope_table: RopeTable) -> tuple[Tensor, Tensor]:
        """cos and sin [R, P] of the rows' positions."""
        angles: tuple[Tensor, Tensor] | None = rows.notes.get(id(rope_table.cos))
        if angles is None and rope_table.axes is not None and rows.places is not None:
            of_pairs = torch.as_tensor(rope_table.axes.of_pairs, device=rows.places.device)
            places = rows.places[:, of_pairs]
            angles = rope_table.cos.gather(0, places), rope_table.sin.gather(0, places)
            rows.notes[id(rope_table.cos)] = angles
        elif angles is None:
            at = rows.positions if rows.rope_rows is None else rows.rope_rows
            angles = rope_table.cos.index_select(0, at), rope_table.sin.index_select(0, at)
            rows.notes[id(rope_table.cos)] = angles
        return angles

    def rope_store(
        self, qkv: Tensor, heads: Heads, rows: ForwardBatch, cache: LayerCache, form: HeadForm = HeadForm()
    ) -> Tensor:
        by_kind = [heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim]
        query, key, rest = torch.split(qkv, [*by_kind, qkv.shape[1] - sum(by_kind)], dim=1)
        query = query.reshape(len(qkv), heads.num_heads, heads.head_dim)
        key = key.reshape(len(qkv), heads.num_kv_heads, heads.head_dim)
        value = rest.reshape(len(qkv), -1, heads.value_size) if rest.shape[1] else None
        if form.q_norm is not None:
            query = self.rms_norm(query, *form.q_norm)
        if form.k_norm is not None:
            key = self.rms_norm(key, *form.k_norm)
        if form.rope_table is not None:
            query, key = self.turned(query, rows, form.rope_table), self.turned(key, rows, form.rope_table)
        cache.rope_table = form.rope_table
        cache.store(key, value, rows.slot_mapping[cache.kind])
        if rows.copies is not None:
            row_ids, slots = rows.copies
            cache.store(key[row_ids], None if value is None else value[row_ids], slots)
        return query.flatten(1)

    def attention(self, query: Tensor, heads: Heads, rows: ForwardBatch, cache: LayerCache, scoring: Scoring) -> Tensor:
        cache.needs_scores = cache.needs_scores or scoring.softcap > 0 or scoring.sinks is not None
        by_head = query.view(query.shape[0], heads.num_heads, heads.head_dim)
        return paged.attention(by_head, cache, rows, scoring).to(self.dtype).flatten(1)

    def activation(self, x: Tensor, kind: Activation) -> Tensor:
        return elementwise(ACTIVATIONS[kind], x.float()).to(self.dtype)

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float) -> Tensor:
        x = x.float()
        bent = torch.where(x > 0, positive * x * x, negative * (elementwise(torch.expm1, x.clamp(max=0)) - x))
        return (beta * x + bent).to(self.dtype)

    def gated(self, x: Tensor, kind: Activation) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        if kind == "clamped_swiglu":
            gate = gate.clamp(max=7.0)
            return (gate * elementwise(torch.sigmoid, 1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)).to(self.dtype)
        return (elementwise(ACTIVATIONS[kind], gate) * up).to(self.dtype)

    def multiply(self, x: Tensor, gate: Tensor, kind: Activation) -> Tensor:
        return (x.float() * elementwise(ACTIVATIONS[kind], gate.float())).to(self.dtype)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * x.new_tensor(factor)

    def columns(self, x: Tensor, first: int, width: int) -> Tensor:
        return x[:, first : first + width].contiguous()

    def softplus(
        self, x: Tensor, bias: Tensor, factor: Tensor | None = None, low: float = 0.0, high: float = math.inf
    ) -> Tensor:
        x = x.float() + bias.float()
        y = elementwise(F.softplus, x).clamp(low, high) + x * 0  # the bounds must not hide NaN and infinity
        return y if factor is None else y * factor.float()

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation, rows: ForwardBatch, state: Tensor
    ) -> Tensor:
        y = recurrent.conv(x.float(), weight.float(), None if bias is None else bias.float(), rows, state)
        return elementwise(ACTIVATIONS[kind], y).to(self.dtype)

    def delta(self, inputs: DeltaInputs, heads: StateHeads, rows: ForwardBatch, state: Tensor, scale: float) -> Tensor:
        wide = DeltaInputs(*(part.float() for part in inputs))
        return (recurrent.delta(wide, heads, rows, state) * scale).to(self.dtype)

    def scan(self, inputs: ScanInputs, heads: StateHeads, rows: ForwardBatch, state: Tensor) -> Tensor:
        wide = ScanInputs(*(None if part is None else part.float() for part in inputs))
        y = recurrent.scan(wide, heads, rows, state)
        if wide.d is not None:
            y = y + wide.d.repeat_interleave(heads.value_dim) * wide.x
        return y.to(self.dtype)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return elementwise(torch.tanh, x.float() / cap) * cap

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Router logits [R, E] -> weights [R, top_k] float32, expert ids [R, top_k], the best first."""
        logits = logits.float()
        if routing.score == "softmax":
            numbers = elementwise(torch.exp, logits - logits.max(-1, keepdim=True).values)
            total = row_sums(numbers)
        else:
            numbers = elementwise(torch.sigmoid, logits)
            total = torch.ones_like(numbers[:, :1])
        choice = logits if routing.bias is None else numbers / total + routing.bias.float()
        if routing.groups is not None:
            choice = self._in_groups(choice, *routing.groups)
        # A stable sort gives equal ones to the lower expert id.
        ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = numbers.gather(1, ids)
        weights = weights / (row_sums(weights) if routing.renormalise else total)
        weights = weights * routing.scale
        if routing.factors is not None:
            weights = weights * routing.factors.float()[ids]
        return weights, ids

    def _in_groups(self, choice: Tensor, num_groups: int, chosen: int, top: int) -> Tensor:
        """`choice` [R, E] with -inf for the experts of groups that take no part."""
        grouped = choice.view(len(choice), num_groups, -1)
        best = grouped.sort(-1, descending=True).values[:, :, :top].sum(-1)
        ids = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :chosen]
        stays = torch.zeros_like(best, dtype=torch.bool).scatter_(1, ids, True)
        return torch.where(stays[:, :, None], grouped, -torch.inf).view(choice.shape)

    def experts(self, x: Tensor, layer: ExpertLayer, seen: Tensor | None = None) -> Tensor:
        routing, kind = layer.routing, layer.kind
        weights, ids = self.route(self.linear(x if seen is None else seen, layer.router), routing)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        activation = self.gated if layer.has_gate else self.activation
        for expert_id in sorted(set(ids.flatten().tolist())):
            row, place = (ids == expert_id).nonzero(as_tuple=True)
            weight = weights[row, place].unsqueeze(1)
            rows = (x[row].float() * weight).to(self.dtype) if routing.scale_input else x[row]
            y = self.linear(activation(self.linear(rows, layer.gate_up[expert_id]), kind), layer.down[expert_id])
            out[row] += y.float() if routing.scale_input else y.float() * weight
        return out.to(self.dtype)
