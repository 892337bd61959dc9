"""Layers whose memory is a state: convolution, the delta rule, Mamba2's scan.

A state advances row by row in the order of positions, and each row's numbers have the same shapes however its sequence
is cut, so its bits are the same. Called by `ops` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.torch_ref.batch import ForwardBatch
from headrace.backends.torch_ref.rowwise import elementwise, row_sums


def chunks_of(rows: ForwardBatch, state: Tensor) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows of each chunk, and a copy of the state before the first."""
    begin = 0
    for length, slot in zip(rows.lens, rows.states_in, strict=True):
        yield range(begin, begin + length), torch.zeros_like(state[0]) if slot < 0 else state[slot].clone()
        begin += length


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, rows: ForwardBatch, state: Tensor) -> Tensor:
    """x [R, W] float32 by weight [K, W] over state [slots, K - 1, W] -> [R, W]."""
    out = torch.empty_like(x)
    size = len(weight)
    for row_ids, before in chunks_of(rows, state):
        inputs = torch.cat([before, x[row_ids.start : row_ids.stop]])
        sums = torch.zeros_like(inputs[size - 1 :]) if bias is None else bias.expand_as(inputs[size - 1 :])
        for k in range(size):
            sums = sums + weight[k] * inputs[k : k + len(row_ids)]
        out[row_ids.start : row_ids.stop] = sums
        for i, row in enumerate(row_ids):
            if row in rows.states_out:
                state[rows.states_out[row]] = inputs[i + 1 : i + size]
    return out


def delta(inputs: DeltaInputs, heads: StateHeads, rows: ForwardBatch, state: Tensor) -> Tensor:
    """As `Ops.delta`, float32 and without the scale."""
    num_rows = len(inputs.value)
    factors: Tensor = elementwise(torch.exp, inputs.decay).view(num_rows, heads.num_heads, 1, -1)
    values: Tensor = inputs.value.view(num_rows, heads.num_heads, heads.value_dim)
    betas: Tensor = inputs.beta.unsqueeze(2)

    def step(row: int, memory: Tensor, k: Tensor) -> Tensor:
        memory = memory * factors[row]
        u = (values[row] - row_sums(memory * k).squeeze(2)) * betas[row]
        return memory + u.unsqueeze(2) * k

    return _recur(step, inputs.key, inputs.query, heads, rows, state)


def scan(inputs: ScanInputs, heads: StateHeads, rows: ForwardBatch, state: Tensor) -> Tensor:
    """As `Ops.scan`, float32 and without d."""
    x, dt = inputs.x, inputs.dt
    factors: Tensor = elementwise(torch.exp, dt * inputs.a).view(len(x), heads.num_heads, 1, 1)
    steps: Tensor = x.view(len(x), heads.num_heads, heads.value_dim, 1) * dt.view(len(x), -1, 1, 1)

    def step(row: int, memory: Tensor, k: Tensor) -> Tensor:
        return memory * factors[row] + steps[row] * k

    return _recur(step, inputs.b, inputs.c, heads, rows, state)


def _recur(
    step: Callable[[int, Tensor, Tensor], Tensor],
    key: Tensor,
    query: Tensor,
    heads: StateHeads,
    rows: ForwardBatch,
    state: Tensor,
) -> Tensor:
    """step(row, state, key): the state after a row, from that before it; both [heads, value_dim, key_dim]. Keys are
    [heads, 1, key_dim]."""
    head_ids = torch.arange(heads.num_heads, device=key.device)
    key_ids = head_ids % heads.num_key_heads if heads.tiled else head_ids // (heads.num_heads // heads.num_key_heads)
    by_head = [x.reshape(len(x), -1, 1, heads.key_dim)[:, key_ids] for x in (key, query)]
    out = torch.empty(len(key), heads.num_heads, heads.value_dim, device=key.device)
    for row_ids, before in chunks_of(rows, state):
        memory = before.transpose(1, 2).contiguous()
        for row in row_ids:
            memory = step(row, memory, by_head[0][row])
            out[row] = row_sums(memory * by_head[1][row]).squeeze(2)
            if row in rows.states_out:
                state[rows.states_out[row]] = memory.transpose(1, 2)
    return out.flatten(1)
