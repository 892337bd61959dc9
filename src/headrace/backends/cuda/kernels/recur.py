"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and Mamba2's recurrence (Dao, Gu 2024, arXiv 2405.21060).

One program for COLUMNS columns of a head's state [key_dim, value_dim] and one chunk: the state lies in registers and
advances there row by row, in prefill as in decode, so no cut of a sequence changes a bit. A sum over the keys is a
chain over parts of the state, then a sum within a part, whose order follows from its layout: so there is one
configuration for each key_dim. Up to 256 keys one warp has all of them, and no row waits for
numbers in shared memory.
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

KEYS_OF_WARP = 256
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
def _with(parts, part):
    return parts + (part,)  # noqa: RUF005, kernels have no unpacking


@triton.jit
def _numbers(x, ld, row, at, inside):
    return tl.load(x + row * ld + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _by_key(x, ld, row, first, is_row, KEY_DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """A row's numbers for the keys of a head, in parts."""
    parts = ()
    for p in tl.static_range(PARTS):
        key = p * PART + tl.arange(0, PART)
        parts = _with(parts, _numbers(x, ld, row, first + key, is_row & (key < KEY_DIM)))
    return parts


@triton.jit
def _product(x, s, PART: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [keys] times s [keys, COLUMNS], both in parts: a chain over the parts, then a sum within one."""
    total = s[0] * x[0][:, None]
    for p in tl.static_range(1, PARTS):
        total = tl.fma(s[p], tl.broadcast_to(x[p][:, None], [PART, COLUMNS]), total)
    return tl.sum(total, 0)


@triton.jit
def _recur(
    query, ld_query, key, ld_key, value, ld_value, decay, ld_decay, beta, ld_beta, a, d, out, ld_out,
    state, row_begin, state_in, state_out, sizes, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, TILED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(2)
    if chunk >= tl.load(sizes + 1):
        return
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    keys = key_head * KEY_DIM
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < VALUE_DIM
    columns = head * VALUE_DIM + column
    begin = tl.load(row_begin + chunk).to(tl.int64)
    end = tl.load(row_begin + chunk + 1).to(tl.int64)
    slot = tl.load(state_in + chunk).to(tl.int64)
    SLOT: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    part = tl.arange(0, PART)[:, None]
    place = head * (KEY_DIM * VALUE_DIM) + part * VALUE_DIM + column[None, :]
    s = ()
    for p in tl.static_range(PARTS):
        inside = (p * PART + part < KEY_DIM) & is_column[None, :] & (slot >= 0)
        s = _with(s, tl.load(state + slot * SLOT + p * PART * VALUE_DIM + place, mask=inside, other=0.0))
    if not DELTA:
        rate = tl.load(a + head).to(tl.float32)
    if d is not None:
        skip = tl.load(d + head).to(tl.float32)
    # Read ahead: the next row's numbers arrive while a row is computed.
    next_q = _by_key(query, ld_query, begin, keys, begin < end, KEY_DIM, PART, PARTS)
    next_k = _by_key(key, ld_key, begin, keys, begin < end, KEY_DIM, PART, PARTS)
    next_v = _numbers(value, ld_value, begin, columns, is_column & (begin < end))
    for i in range(tl.load(row_begin + chunk + 1) - tl.load(row_begin + chunk)):
        row = begin + i
        q, k, v = next_q, next_k, next_v
        is_row = row + 1 < end
        next_q = _by_key(query, ld_query, row + 1, keys, is_row, KEY_DIM, PART, PARTS)
        next_k = _by_key(key, ld_key, row + 1, keys, is_row, KEY_DIM, PART, PARTS)
        next_v = _numbers(value, ld_value, row + 1, columns, is_column & is_row)
        slot = tl.load(state_out + row).to(tl.int64)
        decayed = ()
        if CHANNELS:
            f = _by_key(decay, ld_decay, row, head * KEY_DIM, row < end, KEY_DIM, PART, PARTS)
            for p in tl.static_range(PARTS):
                decayed = _with(decayed, s[p] * tl.exp(f[p])[:, None])
        else:
            step = tl.load(decay + row * ld_decay + head).to(tl.float32)
            factor = tl.exp(step) if DELTA else tl.exp(step * rate)
            for p in tl.static_range(PARTS):
                decayed = _with(decayed, s[p] * factor)
        if DELTA:
            u = (v - _product(k, decayed, PART, PARTS, COLUMNS)) * tl.load(beta + row * ld_beta + head).to(tl.float32)
        else:
            u = v * step
        after = ()
        for p in tl.static_range(PARTS):
            of_key = tl.broadcast_to(k[p][:, None], [PART, COLUMNS])
            after = _with(after, tl.fma(of_key, tl.broadcast_to(u[None, :], [PART, COLUMNS]), decayed[p]))
        s = after
        y = _product(q, s, PART, PARTS, COLUMNS) * scale
        if d is not None:
            y += skip * v
        tl.store(out + row * ld_out + columns, y.to(out.dtype.element_ty), mask=is_column)
        if slot >= 0:
            for p in tl.static_range(PARTS):
                inside = (p * PART + part < KEY_DIM) & is_column[None, :]
                tl.store(state + slot * SLOT + p * PART * VALUE_DIM + place, s[p], mask=inside)


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
    decay, keys = parts["decay"], triton.next_power_of_2(heads.key_dim)
    # 2 lanes hold the columns of a key, so a warp has 16 keys of each part.
    warps = max(keys // KEYS_OF_WARP, 1)
    part = min(16 * warps, keys)
    arguments |= more | {
        "out": out, "ld_out": out.stride(0), "state": state, "row_begin": rows.row_begin, "state_in": rows.state_in,
        "state_out": rows.state_out, "sizes": rows.sizes, "HEADS": heads.num_heads, "KEY_HEADS": heads.num_key_heads,
        "TILED": heads.tiled, "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim, "COLUMNS": COLUMNS,
        "DELTA": parts["beta"] is not None, "CHANNELS": decay is not None and decay.shape[1] > heads.num_heads,
        "PART": part, "PARTS": keys // part,
    }  # fmt: skip
    # Programs that run at the same time read neighbouring columns.
    grid = triton.cdiv(heads.value_dim, COLUMNS), heads.num_heads, num_chunks
    return Launch(KERNEL, grid, arguments, Config({}, warps))
