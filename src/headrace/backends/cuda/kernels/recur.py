"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and Mamba2's recurrence (Dao, Gu 2024, arXiv 2405.21060).

One program for COLUMNS columns of a head's state [key_dim, value_dim] and one chunk: the state lies in registers and
advances there row by row, in prefill as in decode, so no cut of a sequence changes a bit. The order of the sums over
key_dim follows from the layout of the tile, so there is one configuration for each key_dim, whose tile one warp holds
up to 128 keys: nothing is exchanged through shared memory between two rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.torch_ref import recurrent
from headrace.backends.torch_ref.batch import ForwardBatch

COLUMNS = 8
"""Columns of a program: a row of its state is a sector of 32 bytes."""

KEYS_OF_WARP = 128
"""Keys whose state a warp holds."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """A step's rows in device memory, int32: the first row of each chunk [C + 1], the slot of its state before that row
    or -1 [C], the slot of the state after each row or -1 [R]. sizes: the numbers of rows and of chunks first."""

    sizes: Tensor
    row_begin: Tensor
    state_in: Tensor
    state_out: Tensor


@triton.jit
def _row(x, ld, row, at, inside):
    return tl.load(x + row * ld + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(out, ld, row, at, numbers, inside):
    tl.store(out + row * ld + at, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _inputs(
    query, ld_query, key, ld_key, value, ld_value, decay, ld_decay, beta, ld_beta, row, end, keys, columns, head,
    keys_inside, columns_inside, of_head, HEADS: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The numbers of a row, zeros behind the last one: query, key, value, decay, beta."""
    is_row = row < end
    q = _row(query, ld_query, row, keys, keys_inside & is_row)
    k = _row(key, ld_key, row, keys, keys_inside & is_row)
    v = _row(value, ld_value, row, columns, columns_inside & is_row)
    if CHANNELS:
        f = _row(decay, ld_decay, row, of_head, keys_inside & is_row)
    else:
        f = _row(decay, ld_decay, row, head, is_row)
    b = 0.0
    if DELTA:
        b = _row(beta, ld_beta, row, head, is_row)
    return q, k, v, f, b


@triton.jit
def _recur(
    query, ld_query, key, ld_key, value, ld_value, decay, ld_decay, beta, ld_beta, a, d, out, ld_out,
    state, row_begin, state_in, state_out, sizes, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, TILED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(2)
    if chunk >= tl.load(sizes + 1):
        return
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    k = tl.arange(0, KEYS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keys_inside = k < KEY_DIM
    columns_inside = column < VALUE_DIM
    inside = keys_inside[:, None] & columns_inside[None, :]
    place = head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + column[None, :]
    begin = tl.load(row_begin + chunk).to(tl.int64)
    end = tl.load(row_begin + chunk + 1).to(tl.int64)
    slot = tl.load(state_in + chunk).to(tl.int64)
    s = tl.load(state + slot * (HEADS * KEY_DIM * VALUE_DIM) + place, mask=inside & (slot >= 0), other=0.0)
    keys = key_head * KEY_DIM + k
    columns = head * VALUE_DIM + column
    of_head = head * KEY_DIM + k
    if not DELTA:
        rate = tl.load(a + head).to(tl.float32)
    if d is not None:
        skip = tl.load(d + head).to(tl.float32)
    next_q, next_k, next_v, next_f, next_b = _inputs(
        query, ld_query, key, ld_key, value, ld_value, decay, ld_decay, beta, ld_beta, begin, end, keys, columns, head,
        keys_inside, columns_inside, of_head, HEADS, DELTA, CHANNELS,
    )  # fmt: skip
    for i in range(tl.load(row_begin + chunk + 1) - tl.load(row_begin + chunk)):
        row = begin + i
        row_q, row_k, row_v, row_f, row_b = next_q, next_k, next_v, next_f, next_b
        slot = tl.load(state_out + row).to(tl.int64)
        # Read ahead, while this row is computed.
        next_q, next_k, next_v, next_f, next_b = _inputs(
            query, ld_query, key, ld_key, value, ld_value, decay, ld_decay, beta, ld_beta, row + 1, end, keys, columns,
            head, keys_inside, columns_inside, of_head, HEADS, DELTA, CHANNELS,
        )  # fmt: skip
        if CHANNELS:
            s = s * tl.exp(row_f)[:, None]
        elif DELTA:
            s = s * tl.exp(row_f)
        else:
            s = s * tl.exp(row_f * rate)
        if DELTA:
            u = (row_v - tl.sum(s * row_k[:, None], 0)) * row_b
        else:
            u = row_v * row_f
        s = tl.fma(tl.broadcast_to(row_k[:, None], [KEYS, COLUMNS]), tl.broadcast_to(u[None, :], [KEYS, COLUMNS]), s)
        y = tl.sum(s * row_q[:, None], 0) * scale
        if d is not None:
            y += skip * row_v
        _put(out, ld_out, row, columns, y, columns_inside)
        if slot >= 0:
            tl.store(state + slot * (HEADS * KEY_DIM * VALUE_DIM) + place, s, mask=inside)


def forward_batch(a: Arguments, *, writes: bool = True) -> ForwardBatch:
    """Return the step's chunks as torch_ref's operators take them; with no states to write unless `writes`."""
    num_chunks = int(a.sizes[1])
    begins = a.row_begin[: num_chunks + 1].tolist()
    slots = a.state_out[: begins[-1]].tolist() if writes else []
    empty = torch.empty(0)
    return ForwardBatch(
        empty, empty, (), [], [end - begin for begin, end in pairwise(begins)], (),
        states_in=a.state_in[:num_chunks].tolist(),
        states_out={row: slot for row, slot in enumerate(slots) if slot >= 0},
    )  # fmt: skip


def _twin(a: Arguments) -> None:
    batch = forward_batch(a)
    rows, heads = sum(batch.lens), StateHeads(a.HEADS, a.KEY_HEADS, a.KEY_DIM, a.VALUE_DIM, a.TILED)
    query, key, value, decay = (x[:rows].float() for x in (a.query, a.key, a.value, a.decay))
    if a.DELTA:
        inputs = DeltaInputs(query, key, value, decay, a.beta[:rows].float())
        y = recurrent.delta(inputs, heads, batch, a.state) * a.scale
    else:
        y = recurrent.scan(ScanInputs(value, key, query, decay, a.a.float()), heads, batch, a.state)
    if a.d is not None:
        y = y + a.d.float().repeat_interleave(a.VALUE_DIM) * value
    a.out[:rows] = y


KERNEL = Kernel(_recur, _twin, fuse=False)


def delta(
    inputs: DeltaInputs, heads: StateHeads, out: Tensor, state: Tensor, rows: StateRows, num_chunks: int, scale: float
) -> Launch:
    """As `Ops.delta` -> out [R, heads * value_dim], for at most `num_chunks` chunks.

    state: float32 [slots, heads, key_dim, value_dim], contiguous. A chunk may write the slot that it reads.
    """
    query, key, value, decay, beta = inputs
    parts = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
    return _recurred(parts, heads, out, state, rows, num_chunks, {"a": None, "d": None, "scale": scale})


def scan(inputs: ScanInputs, heads: StateHeads, out: Tensor, state: Tensor, rows: StateRows, num_chunks: int) -> Launch:
    """As `Ops.scan` -> out [R, heads * value_dim]; the rest as in `delta`."""
    x, b, c, dt, a, d = inputs
    parts = {"query": c, "key": b, "value": x, "decay": dt, "beta": None}
    return _recurred(parts, heads, out, state, rows, num_chunks, {"a": a, "d": d, "scale": 1.0})


def _recurred(
    parts: dict[str, Tensor | None],
    heads: StateHeads,
    out: Tensor,
    state: Tensor,
    rows: StateRows,
    num_chunks: int,
    more: dict[str, Argument],
) -> Launch:
    arguments: dict[str, Argument] = dict(parts)
    arguments |= {f"ld_{name}": 0 if part is None else part.stride(0) for name, part in parts.items()}
    keys, decay = triton.next_power_of_2(heads.key_dim), parts["decay"]
    arguments |= more | {
        "out": out, "ld_out": out.stride(0), "state": state, "row_begin": rows.row_begin, "state_in": rows.state_in,
        "state_out": rows.state_out, "sizes": rows.sizes, "HEADS": heads.num_heads, "KEY_HEADS": heads.num_key_heads,
        "TILED": heads.tiled, "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim, "KEYS": keys, "COLUMNS": COLUMNS,
        "DELTA": parts["beta"] is not None, "CHANNELS": decay is not None and decay.shape[1] > heads.num_heads,
    }  # fmt: skip
    # Programs that run at the same time read neighbouring columns.
    grid = triton.cdiv(heads.value_dim, COLUMNS), heads.num_heads, num_chunks
    return Launch(KERNEL, grid, arguments, Config({}, max(keys // KEYS_OF_WARP, 1)))
