"""Pairs of a row and one of its experts, sorted by expert, and the tiles of the products over them.

`_group` sorts without atomics: experts ascend, and the rows of an expert too. The products' programs stay and take one
tile after the other. Which tiles there are they find from the experts' offsets in device memory, so that a launch has
no more programs than its bucket can have tiles, and experts that no row chose cost nothing. The rest are the parts that
products of all forms of weights share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.rows import activated, sigmoid
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.ops import ACTIVATIONS, RefOps
from headrace.backends.torch_ref.rowwise import elementwise


@triton.jit
def _group(ids, order, offsets, sizes, TOP_K: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """One program an expert: count the pairs of those before it, then place its own in ascending order."""
    expert = tl.program_id(0)
    num_pairs = tl.load(sizes + DIM) * TOP_K
    pair = tl.arange(0, PAIRS)
    lower = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, PAIRS):
        values = tl.load(ids + first + pair, mask=first + pair < num_pairs, other=expert)
        lower += (values < expert).to(tl.int32)
    at = tl.sum(lower, 0)
    if expert == 0:
        tl.store(offsets, 0)
    for first in range(0, num_pairs, PAIRS):
        values = tl.load(ids + first + pair, mask=first + pair < num_pairs, other=-1)
        equal = (values == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(equal, 0) - 1, first + pair, mask=values == expert)
        at += tl.sum(equal, 0)
    tl.store(offsets + expert + 1, at)


def _group_twin(a: Arguments) -> None:
    pairs = a.ids.view(-1)[: int(a.sizes[a.DIM]) * a.TOP_K]
    a.order[: len(pairs)] = torch.sort(pairs, stable=True).indices.int()
    counts = torch.bincount(pairs, minlength=len(a.offsets) - 1)
    a.offsets.copy_(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


GROUP = Kernel(
    _group,
    _group_twin,
    (Config({"PAIRS": 1024}, 4), Config({"PAIRS": 4096}, 8), Config({"PAIRS": 128}, 1)),
)


def group(ids: Tensor, order: Tensor, offsets: Tensor, sizes: Tensor, dim: int, num_rows: int) -> Launch:
    """ids int32 [R, top_k] -> order int32 [P], pairs by expert; offsets int32 [E + 1], each expert's part of it."""
    top_k = ids.shape[1]
    few, num_pairs = GROUP.configs[0].tiles["PAIRS"], num_rows * top_k
    least = GROUP.configs[2].tiles["PAIRS"]
    arguments: dict[str, Argument] = {
        "ids": ids, "order": order, "offsets": offsets, "sizes": sizes, "TOP_K": top_k, "DIM": dim
    }  # fmt: skip
    config = GROUP.configs[2 if num_pairs <= least else num_pairs > few]
    return Launch(GROUP, (len(offsets) - 1,), arguments, config)


@triton.jit
def tiles_of(offsets, N, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr, COLS: tl.constexpr):
    """The number of tiles of each expert: BR rows by COLS of N columns."""
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    counts = tl.load(offsets + expert + 1, mask=inside, other=0) - tl.load(offsets + expert, mask=inside, other=0)
    return (counts + BR - 1) // BR * tl.cdiv(N, COLS)


@triton.jit
def tile_at(item, offsets, tiles, BLOCK: tl.constexpr, BR: tl.constexpr):
    """-> the expert of tile `item`, the place of its first row, that behind the expert's last row, and its column."""
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= item).to(tl.int32), 0)
    first = tl.load(offsets + expert)
    last = tl.load(offsets + expert + 1)
    # Tiles of rows are next to each other, so that they share the weights while these are in L2.
    item -= tl.sum(tl.where(tl.arange(0, BLOCK) < expert, tiles, 0), 0)
    row_tiles = tl.cdiv(last - first, BR)
    return expert, first + item % row_tiles * BR, last, item // row_tiles


@triton.jit
def rows_at(row, last, order, FIRST: tl.constexpr, TOP_K: tl.constexpr):
    """-> rows of x and of the output. The first product reads rows by pair and writes by place, the second reads by
    place and writes by pair. Rows behind the last one repeat it: nothing is read behind it, and loads have no mask."""
    place = tl.minimum(row, last - 1)
    pair = tl.load(order + place)
    if FIRST:
        return pair // TOP_K, place
    else:
        return place, pair


@triton.jit
def joined(gate, up, ACT: tl.constexpr, GATED: tl.constexpr):
    """act(gate) * up, or act(gate) where there is no gate. NaN stays NaN."""
    if ACT == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate * sigmoid(1.702 * gate) * (up + 1.0)
    else:
        v = activated(gate, ACT)
        if GATED:
            v = v * up
        return v


@triton.jit
def put(acc, acc_up, expert, row, last, out_row, col, N, bias, out, ld_out, ACT: tl.constexpr, GATED: tl.constexpr):
    """Add the bias, activate and store a tile of sums [rows, columns]."""
    if bias is not None:
        at = bias + expert * N * (2 if GATED else 1) + col
        acc += tl.load(at, mask=col < N, other=0.0)[None, :]
        if GATED:
            acc_up += tl.load(at + N, mask=col < N, other=0.0)[None, :]
    v = joined(acc, acc_up, ACT, GATED)
    at = out_row.to(tl.int64)[:, None] * ld_out + col[None, :]
    tl.store(out + at, v.to(out.dtype.element_ty), mask=(row < last)[:, None] & (col < N)[None, :])


def by_expert(a: Arguments) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that has rows, with their rows of x and of the output."""
    for expert, (first, last) in enumerate(itertools.pairwise(a.offsets.tolist())):
        if first == last:
            continue
        places, pairs = torch.arange(first, last, device=a.x.device), a.order[first:last].long()
        yield (expert, pairs // a.TOP_K, places) if a.FIRST else (expert, places, pairs)


def multiply_each(a: Arguments, product: Callable[[Tensor, slice], Tensor]) -> None:
    """The twin of all products. product: returns float32 sums, of rows of x with some of the weights' outputs."""
    num_outs = a.N * (2 if a.GATED else 1)
    for expert, rows, out_rows in by_expert(a):
        outputs = slice(expert * num_outs, (expert + 1) * num_outs)
        v = product(rows, outputs)
        if a.bias is not None:
            v = v + a.bias[outputs]
        if a.GATED:
            v = RefOps(v.device, torch.float32).gated(v, a.ACT)
        elif a.ACT:
            v = elementwise(ACTIVATIONS[a.ACT], v)
        a.out[out_rows, : a.N] = v.to(a.out.dtype)
