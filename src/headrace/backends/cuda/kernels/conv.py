"""Causal convolution of each column over the rows of its sequence, whose last inputs are a state.

`_conv` computes all rows at once: a row finds its chunk by bisection, and takes its inputs from the rows before it, or
from the chunk's state. `_keep` then writes the states, which are read no more. The sum of a number has one order, that
of the weights, so tiles change no bits.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.recur import StateRows, forward_batch
from headrace.backends.cuda.kernels.rows import activated
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref import recurrent
from headrace.backends.torch_ref.ops import ACTIVATIONS
from headrace.backends.torch_ref.rowwise import elementwise

CONFIGS = tuple(
    Config({"ROWS": num_rows, "COLUMNS": columns}, warps) for num_rows, columns, warps in ((16, 128, 4), (1, 256, 2))
)
FEW = 16
"""Up to as many rows each has programs of its own."""

SCANNED = tl.constexpr(256)
"""Rows that are searched at once for states to write."""

MOST_KEPT = 4096
"""Numbers of the first rows' states that a program holds at most."""


@triton.jit
def _conv(
    x, ld_x, weight, bias, state, row_begin, state_in, out, ld_out, sizes, width,
    SIZE: tl.constexpr, KIND: tl.constexpr, HALVINGS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(sizes)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    is_row = row < num_rows
    # The last chunk that begins at the row or before it.
    chunk = tl.zeros([ROWS], tl.int32)
    end = chunk + tl.load(sizes + 1)
    for _ in range(HALVINGS):
        middle = (chunk + end) // 2
        begins = tl.load(row_begin + middle) <= row
        chunk = tl.where(begins, middle, chunk)
        end = tl.where(begins, end, middle)
    place = (row - tl.load(row_begin + chunk))[:, None]
    slot = tl.load(state_in + chunk)[:, None].to(tl.int64)
    row = row[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = is_row[:, None] & (column < width)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    for k in tl.static_range(SIZE):
        back = SIZE - 1 - k
        is_new = place >= back
        v = tl.load(x + (row - back) * ld_x + column, mask=inside & is_new, other=0.0).to(tl.float32)
        is_kept = inside & (place < back) & (slot >= 0)
        old = tl.load(state + (slot * (SIZE - 1) + place + k) * width + column, mask=is_kept, other=0.0)
        w = tl.load(weight + k * width + column, mask=column < width, other=0.0).to(tl.float32)
        total += w * tl.where(is_new, v, old)
    tl.store(out + row * ld_out + column, activated(total, KIND).to(out.dtype.element_ty), mask=inside)


def _conv_twin(a: Arguments) -> None:
    batch = forward_batch(a, writes=False)
    rows, bias = sum(batch.lens), None if a.bias is None else a.bias.float()
    y = recurrent.conv(a.x[:rows].float(), a.weight.float(), bias, batch, a.state)
    a.out[:rows] = elementwise(ACTIVATIONS[a.KIND], y)


@triton.jit
def _keep(
    x, ld_x, state, row_begin, state_in, state_out, sizes, width,
    SIZE: tl.constexpr, PAST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    if chunk >= tl.load(sizes + 1):
        return
    begin = tl.load(row_begin + chunk)
    end = tl.load(row_begin + chunk + 1)
    slot = tl.load(state_in + chunk).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # States after the first rows have numbers of the state before them, which they may overwrite: all are read first.
    early = tl.arange(0, PAST)[:, None, None]
    number = tl.arange(0, PAST)[None, :, None]
    of_column = column[None, None, :]
    late = tl.minimum(begin + SIZE - 2, end)
    early_slot = tl.load(state_out + begin + early, mask=begin + early < late, other=-1).to(tl.int64)
    is_early = (early_slot >= 0) & (number < SIZE - 1) & (of_column < width)
    source = early + 1 + number
    is_old = source < SIZE - 1
    before = state + (slot * (SIZE - 1) + source) * width + of_column
    old = tl.load(before, mask=is_early & is_old & (slot >= 0), other=0.0)
    row = (begin + source - (SIZE - 1)).to(tl.int64)
    new = tl.load(x + row * ld_x + of_column, mask=is_early & (source >= SIZE - 1), other=0.0).to(tl.float32)
    tl.debug_barrier()
    early_place = (early_slot * (SIZE - 1) + number) * width + of_column
    tl.store(state + early_place, tl.where(is_old, old, new), mask=is_early)
    # Those after all others have inputs of the chunk alone.
    back = SIZE - 2 - tl.arange(0, PAST)[:, None]
    inside = (back >= 0) & (column[None, :] < width)
    for first in range(late, end, SCANNED):
        rows = first + tl.arange(0, SCANNED)
        is_written = tl.load(state_out + rows, mask=rows < end, other=-1) >= 0
        for _ in range(tl.sum(is_written.to(tl.int32), 0)):
            last = tl.min(tl.where(is_written, rows, end), 0)
            is_written = is_written & (rows != last)
            v = tl.load(x + (last - back).to(tl.int64) * ld_x + column[None, :], mask=inside, other=0.0)
            place = tl.load(state_out + last).to(tl.int64) * (SIZE - 1) + (SIZE - 2 - back)
            tl.store(state + place * width + column[None, :], v.to(tl.float32), mask=inside)


def _keep_twin(a: Arguments) -> None:
    batch = forward_batch(a)
    for row_ids, before in recurrent.chunks_of(batch, a.state):
        inputs = torch.cat([before, a.x[row_ids.start : row_ids.stop].float()])
        for i, row in enumerate(row_ids):
            if row in batch.states_out:
                a.state[batch.states_out[row]] = inputs[i + 1 : i + a.SIZE]


CONV = Kernel(_conv, _conv_twin, CONFIGS, fuse=False)
KEEP = Kernel(_keep, _keep_twin)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: Literal["silu", "identity"],
    out: Tensor,
    state: Tensor,
    rows: StateRows,
    num_rows: int,
    num_chunks: int,
    *,
    config: Config | None = None,
) -> list[Launch]:
    """kind(convolution of x [R, W] by weight [K, W], + bias [W]) -> out [R, W], for at most `num_rows` rows of
    `num_chunks` chunks.

    state: float32 [slots, K - 1, W], the last inputs, the oldest first; contiguous. A chunk may write the slot that it
    reads.
    """
    size, width = weight.shape
    config = config or CONV.configs[num_rows <= FEW]
    shared: dict[str, Argument] = {
        "x": x, "ld_x": x.stride(0), "state": state, "row_begin": rows.row_begin, "state_in": rows.state_in,
        "sizes": rows.sizes, "width": width, "SIZE": size,
    }  # fmt: skip
    arguments: dict[str, Argument] = {
        "weight": weight, "bias": bias, "out": out, "ld_out": out.stride(0), "KIND": kind,
        "HALVINGS": max(num_chunks - 1, 0).bit_length(),
    }  # fmt: skip
    grid = triton.cdiv(num_rows, config.tiles["ROWS"]), triton.cdiv(width, config.tiles["COLUMNS"])
    past = triton.next_power_of_2(size - 1)
    columns = max(MOST_KEPT // past**2, 16)
    of_states: dict[str, Argument] = {"state_out": rows.state_out, "PAST": past, "COLUMNS": columns}
    return [
        Launch(CONV, grid, shared | arguments, config),
        Launch(KEEP, (num_chunks, triton.cdiv(width, columns)), shared | of_states, KEEP.configs[0]),
    ]
