"""Mixture of experts (Shazeer et al. 2017): route, group, two grouped products, combine.

`_route` chooses each row's experts; `_group` sorts the pairs of row and expert by expert, rows ascending, without
atomics; `_grouped` multiplies each expert's rows by its weights: programs stay and take one tile after the other, which
they find from the experts' offsets in device memory; `_combine` adds a row's results in ascending expert id. Sums over
K have one order and are never split, so a row's bits do not depend on which rows share its experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels.linear import _sum, sum_of_spans
from headrace.backends.cuda.kernels.rows import activated
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.ops import ACTIVATIONS
from headrace.backends.torch_ref.rowwise import elementwise, row_sums

LEAST_INT = tl.constexpr(-(2**31))


@triton.jit
def _route(
    logits, ld_logits, weights, ids, sizes, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    expert = tl.arange(0, BLOCK)
    v = tl.load(logits + row * ld_logits + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    v = tl.where(v == 0, 0.0, v)
    # Integers in the order of the numbers; NaN comes first, so that it shows in the row's result.
    bits = v.to(tl.int32, bitcast=True)
    order = tl.where(expert < EXPERTS, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST_INT)
    left = order
    for _ in range(TOP_K):
        left = tl.where(expert == tl.argmax(left, 0, tie_break_left=True), LEAST_INT, left)
    chosen = left != order
    e = tl.exp(v - tl.max(tl.where(chosen, v, float("-inf")), 0))
    if RENORMALISE:
        e = tl.where(chosen, e, 0.0)
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids + place, expert, mask=chosen)
    tl.store(weights + place, e / tl.sum(e, 0), mask=chosen)


def _route_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.logits[:rows, : a.EXPERTS].float()
    best = torch.sort(v, dim=-1, descending=True, stable=True)
    chosen = best.indices[:, : a.TOP_K].sort(-1).values
    e = elementwise(torch.exp, v - best.values[:, :1])
    a.ids[:rows] = chosen.int()
    a.weights[:rows] = e.gather(1, chosen) / row_sums(e.gather(1, chosen) if a.RENORMALISE else e)


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


@triton.jit
def _grouped(
    x, ld_x, weight, out, ld_out, order, offsets, K, N,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    WHOLE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = BN // 2 if GATED else BN
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    counts = tl.load(offsets + expert + 1, mask=inside, other=0) - tl.load(offsets + expert, mask=inside, other=0)
    col_tiles = tl.cdiv(N, COLS)
    tiles = (counts + BR - 1) // BR * col_tiles
    ends = tl.cumsum(tiles, 0)
    k = tl.arange(0, BK)[None, :]
    program = tl.program_id(0)
    for turn in range(0, tl.sum(tiles, 0) - program, tl.num_programs(0)):
        item = program + turn
        tile_expert = tl.sum((ends <= item).to(tl.int32), 0)
        first = tl.load(offsets + tile_expert)
        last = tl.load(offsets + tile_expert + 1)
        # Tiles of rows are next to each other, so that they share the weights while these are in L2.
        item -= tl.sum(tl.where(expert < tile_expert, tiles, 0), 0)
        row_tiles = tl.cdiv(last - first, BR)
        row = first + item % row_tiles * BR + tl.arange(0, BR)
        col_tile = item // row_tiles
        col = col_tile * COLS + tl.arange(0, COLS)
        # Rows and columns beyond the end repeat the last one: nothing is read behind it, and loads have no mask.
        place = tl.minimum(row, last - 1)
        pair = tl.load(order + place)
        x_row = place
        out_row = pair
        if GATED:
            x_row = pair // TOP_K
            out_row = place
        x_at = x_row.to(tl.int64)[:, None] * ld_x + k
        w_at = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)[:, None] * K + k
        w = weight + (tile_expert.to(tl.int64) * N * (2 if GATED else 1) + col_tile * COLS) * K
        acc = tl.zeros([COLS, BR] if SWAP else [BR, COLS], tl.float32)
        acc, acc_up = _sum(x, x_at, w, w_at, w + N.to(tl.int64) * K, 0, K, acc, acc, GATED, BK, SWAP, WHOLE)
        if SWAP:
            acc = tl.trans(acc)
            acc_up = tl.trans(acc_up)
        if GATED:
            acc = activated(acc, ACT) * acc_up
        at = out_row.to(tl.int64)[:, None] * ld_out + col[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(row < last)[:, None] & (col < N)[None, :])


def _grouped_twin(a: Arguments) -> None:
    for expert, (first, last) in enumerate(itertools.pairwise(a.offsets.tolist())):
        if first == last:
            continue
        places, pairs = torch.arange(first, last, device=a.x.device), a.order[first:last].long()
        v = sum_of_spans([(a.x[pairs // a.TOP_K if a.GATED else places, : a.K].float(), a.weight[expert].float())])
        if a.GATED:
            v = elementwise(ACTIVATIONS[a.ACT], v[:, : a.N]) * v[:, a.N :]
        a.out[places if a.GATED else pairs, : a.N] = v.to(a.out.dtype)


@triton.jit
def _combine(
    y, ld_y, weights, out, ld_out, sizes, width, TOP_K: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = row * TOP_K + i
        v = tl.load(y + pair * ld_y + column, mask=column < width, other=0.0).to(tl.float32)
        total += v * tl.load(weights + pair)
    tl.store(out + row * ld_out + column, total.to(out.dtype.element_ty), mask=column < width)


def _combine_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.y[: rows * a.TOP_K, : a.width].float().view(rows, a.TOP_K, a.width) * a.weights[:rows, :, None]
    total = v[:, 0]
    for i in range(1, a.TOP_K):
        total = total + v[:, i]
    a.out[:rows, : a.width] = total


def _tile(rows: int, columns: int, depth: int, swap: int, warps: int, stages: int, *capabilities: int) -> Config:
    return Config({"BR": rows, "BN": columns, "BK": depth, "SWAP": swap}, warps, stages, capabilities)


# Nothing is fused, so that all configurations round alike. The sum of a softmax follows from its one configuration.
ROUTE = Kernel(_route, _route_twin, (Config({}, 1),), fuse=False)
GROUP = Kernel(_group, _group_twin, (Config({"PAIRS": 1024}, 4), Config({"PAIRS": 4096}, 8)))
COMBINE = Kernel(_combine, _combine_twin, (Config({"COLUMNS": 1024}, 4), Config({"COLUMNS": 512}, 2)), fuse=False)
GROUPED = Kernel(
    _grouped,
    _grouped_twin,
    (
        _tile(16, 128, 64, 1, 4, 4),
        _tile(16, 128, 128, 1, 4, 4, 80, 90, 100),
        _tile(32, 128, 64, 1, 4, 4),
        _tile(64, 128, 64, 1, 4, 3),
        _tile(128, 128, 64, 0, 8, 3),
        _tile(128, 128, 64, 0, 8, 4, 80, 90, 100),
        _tile(128, 256, 64, 0, 8, 3, 90),
    ),
    fuse=False,
)

FULL = _tile(16, 32, 32, 0, 4, 2)
"""For float32, which has no tensor cores here: correct, and slow."""


class Scratch(NamedTuple):
    """The buffers that pass results from launch to launch; P = rows * top_k pairs.

    weights float32 and ids int32 [R, top_k], ids ascending in a row; order int32 [P], pairs sorted by expert; offsets
    int32 [E + 1], each expert's part of it; inner [P, I] in the model's dtype, in that order; outer float32 [P, H], by
    pair.
    """

    weights: Tensor
    ids: Tensor
    order: Tensor
    offsets: Tensor
    inner: Tensor
    outer: Tensor


def make_scratch(num_rows: int, top_k: int, down: Tensor) -> Scratch:
    """Memory for at most `num_rows` rows and the experts of `down` [E, H, I]."""
    (num_experts, hidden, inner), device, pairs = down.shape, down.device, num_rows * top_k
    return Scratch(
        weights=torch.empty(num_rows, top_k, device=device),
        ids=torch.empty(num_rows, top_k, dtype=torch.int32, device=device),
        order=torch.empty(pairs, dtype=torch.int32, device=device),
        offsets=torch.empty(num_experts + 1, dtype=torch.int32, device=device),
        inner=torch.empty(pairs, inner, dtype=down.dtype, device=device),
        outer=torch.empty(pairs, hidden, device=device),
    )


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices [out, in] as one tensor [E, out, in]: a view where they lie side by side, else a copy."""
    first = matrices[0]
    if all(m.is_contiguous() and m.data_ptr() == first.data_ptr() + i * m.nbytes for i, m in enumerate(matrices)):
        return first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(matrices))


def default(weight: Tensor, num_pairs: int) -> Config:
    """The configuration where none was measured, for the mean number of rows of an expert."""
    if weight.dtype == torch.float32:
        return FULL
    if weight.shape[1] % 32 or weight.shape[2] % 16:
        return GROUPED.configs[0]  # loads of single numbers, of which large tiles would spill
    mean = num_pairs / weight.shape[0]
    return next(c for c in GROUPED.configs if not c.capabilities and c.tiles["BR"] >= min(mean, 128))


def experts(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    scratch: Scratch,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    top_k: int,
    kind: Activation,
    num_programs: int,
    renormalise: bool = True,
    config: Config | None = None,
) -> list[Launch]:
    """Sum over a row's `top_k` best experts, in ascending id, of weight * down(gated(gate_up(x))) -> out [R, H].

    x [R, H]; logits [R, E], of which equal ones go to the lower id; gate_up [E, 2 * I, H] and down [E, H, I],
    contiguous. sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts, at most `num_rows`.
    num_programs: programs that the GPU runs at once. renormalise: the softmax is over the chosen experts alone. config:
    of the products.
    """
    num_experts, hidden, _ = down.shape
    num_pairs = num_rows * top_k
    config = config or default(gate_up, num_pairs)
    block = triton.next_power_of_2(num_experts)
    per_expert: dict[str, Argument] = {"EXPERTS": num_experts, "BLOCK": block, "TOP_K": top_k}
    s = scratch
    route: dict[str, Argument] = {
        "logits": logits, "ld_logits": logits.stride(0), "weights": s.weights, "ids": s.ids, "sizes": sizes,
        "RENORMALISE": renormalise, "DIM": dim, **per_expert,
    }  # fmt: skip
    group: dict[str, Argument] = {
        "ids": s.ids,
        "order": s.order,
        "offsets": s.offsets,
        "sizes": sizes,
        "TOP_K": top_k,
        "DIM": dim,
    }
    sort = GROUP.configs[num_pairs > GROUP.configs[0].tiles["PAIRS"]]
    combine: dict[str, Argument] = {
        "y": s.outer, "ld_y": s.outer.stride(0), "weights": s.weights, "out": out, "ld_out": out.stride(0),
        "sizes": sizes, "width": hidden, "TOP_K": top_k, "DIM": dim,
    }  # fmt: skip

    def grouped(a: Tensor, weight: Tensor, result: Tensor, gated: bool) -> Launch:
        num_in, num_out = weight.shape[2], result.shape[1]
        arguments: dict[str, Argument] = {
            "x": a, "ld_x": a.stride(0), "weight": weight, "out": result, "ld_out": result.stride(0),
            "order": s.order, "offsets": s.offsets, "K": num_in, "N": num_out, "ACT": kind if gated else "",
            "GATED": gated, "WHOLE": num_in % config.tiles["BK"] == 0, **per_expert,
        }  # fmt: skip
        row_tiles = min(num_pairs, num_pairs // config.tiles["BR"] + num_experts)
        items = row_tiles * triton.cdiv(weight.shape[1], config.tiles["BN"])
        return Launch(GROUPED, (min(items, num_programs),), arguments, config)

    columns = COMBINE.configs[0].tiles["COLUMNS"]
    return [
        Launch(ROUTE, (num_rows,), route, ROUTE.configs[0]),
        Launch(GROUP, (num_experts,), group, sort),
        grouped(x, gate_up, s.inner, True),
        grouped(s.inner, down, s.outer, False),
        Launch(COMBINE, (num_rows, triton.cdiv(hidden, columns)), combine, COMBINE.configs[0]),
    ]
