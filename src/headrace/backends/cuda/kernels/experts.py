"""Mixture of experts (Shazeer et al. 2017): route, group, two grouped products, combine.

`routing` chooses each row's experts, `grouping` sorts the pairs of row and expert. `_grouped` multiplies each expert's
rows by its weights; `experts_codes` has the same for codes. `_combine` adds a row's results in ascending expert id.
Sums over K have one order and are never split, so a row's bits do not depend on which rows share its experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Activation, Routing
from headrace.backends.cuda.kernels import experts_codes, linear_8bit
from headrace.backends.cuda.kernels.grouping import group, multiply_each, put, rows_at, tile_at, tiles_of
from headrace.backends.cuda.kernels.linear import _sum, sum_of_spans
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.kernels.linear_codes import PackedCodes
from headrace.backends.cuda.kernels.routing import route
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch


@triton.jit
def _grouped(
    x, ld_x, weight, bias, out, ld_out, order, offsets, K, N,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = BN // 2 if GATED else BN
    tiles = tiles_of(offsets, N, EXPERTS, BLOCK, BR, COLS)
    k = tl.arange(0, BK)[None, :]
    program = tl.program_id(0)
    for turn in range(0, tl.sum(tiles, 0) - program, tl.num_programs(0)):
        expert, first, last, col_tile = tile_at(program + turn, offsets, tiles, BLOCK, BR)
        row = first + tl.arange(0, BR)
        x_row, out_row = rows_at(row, last, order, FIRST, TOP_K)
        col = col_tile * COLS + tl.arange(0, COLS)
        x_at = x_row.to(tl.int64)[:, None] * ld_x + k
        # Columns beyond the end repeat the last one.
        w_at = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)[:, None] * K + k
        w = weight + (expert.to(tl.int64) * N * (2 if GATED else 1) + col_tile * COLS) * K
        acc = tl.zeros([COLS, BR] if SWAP else [BR, COLS], tl.float32)
        acc, acc_up = _sum(x, x_at, w, w_at, w + N.to(tl.int64) * K, 0, K, acc, acc, GATED, BK, SWAP, WHOLE)
        if SWAP:
            acc = tl.trans(acc)
            acc_up = tl.trans(acc_up)
        put(acc, acc_up, expert, row, last, out_row, col, N, bias, out, ld_out, ACT, GATED)


def _grouped_twin(a: Arguments) -> None:
    weight = a.weight.view(-1, a.K)
    multiply_each(a, lambda rows, outputs: sum_of_spans([(a.x[rows, : a.K].float(), weight[outputs].float())]))


@triton.jit
def _scale_pairs(x, ld_x, weights, out, ld_out, sizes, width, TOP_K: tl.constexpr, DIM: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    if pair >= tl.load(sizes + DIM) * TOP_K:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    v = tl.load(x + pair // TOP_K * ld_x + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + pair * ld_out + column, (v * tl.load(weights + pair)).to(out.dtype.element_ty), mask=column < width)


def _scale_pairs_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.x[:rows, None, : a.width].float() * a.weights[:rows, :, None]
    a.out[: rows * a.TOP_K, : a.width] = v.flatten(0, 1).to(a.out.dtype)


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
        if weights is not None:
            v = v * tl.load(weights + pair)
        total += v
    tl.store(out + row * ld_out + column, total.to(out.dtype.element_ty), mask=column < width)


def _combine_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.y[: rows * a.TOP_K, : a.width].float().view(rows, a.TOP_K, a.width)
    if a.weights is not None:
        v = v * a.weights[:rows, :, None]
    total = v[:, 0]
    for i in range(1, a.TOP_K):
        total = total + v[:, i]
    a.out[:rows, : a.width] = total


def _tile(rows: int, columns: int, depth: int, swap: int, warps: int, stages: int, *capabilities: int) -> Config:
    return Config({"BR": rows, "BN": columns, "BK": depth, "SWAP": swap}, warps, stages, capabilities)


SCALE_PAIRS = Kernel(_scale_pairs, _scale_pairs_twin, (Config({"COLUMNS": 1024}, 4),), fuse=False)
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


class Stack(NamedTuple):
    """The same matrix of all experts: their outputs, E * num_out, are the rows of `data`, expert by expert.

    data: plain [E * num_out, num_in] or [E, num_out, num_in] in the model's dtype, contiguous; or codes of that many
    rows. bias: float32 [E * num_out], or None.
    """

    data: Tensor | PackedCodes | EightBits
    num_experts: int
    bias: Tensor | None = None

    @property
    def num_in(self) -> int:
        return self.data.num_in if isinstance(self.data, PackedCodes) else int(self.codes.shape[-1])

    @property
    def num_out(self) -> int:
        """Of one expert."""
        rows = self.codes.shape[:-1].numel()
        return rows // self.num_experts

    @property
    def codes(self) -> Tensor:
        return self.data if isinstance(self.data, Tensor) else self.data.codes

    @property
    def is_plain(self) -> bool:
        return isinstance(self.data, Tensor)

    @property
    def rounds_rows(self) -> bool:
        return isinstance(self.data, EightBits)


class Mixture(NamedTuple):
    """A layer's experts: gate_up [E, 2 * I, H], or [E, I, H] without a gate, and down [E, H, I]. `scale_input` and the
    other rules are those of `routing`; `kind` is the activation between the two products."""

    routing: Routing
    gate_up: Stack
    down: Stack
    kind: Activation

    @property
    def has_gate(self) -> bool:
        return self.gate_up.num_out != self.down.num_in


class Scratch(NamedTuple):
    """The buffers that pass results from launch to launch; P = rows * top_k pairs.

    weights float32 and ids int32 [R, top_k], ids ascending in a row; order int32 [P], pairs sorted by expert; offsets
    int32 [E + 1], each expert's part of it; inner [P, I] in the model's dtype, in that order; outer float32 [P, H], by
    pair. scaled [P, H]: inputs of experts, where these are weighted; rounded: rows of 8 bits, of both products in turn,
    and round_scales float32, their scales, where a product takes such.
    """

    weights: Tensor
    ids: Tensor
    order: Tensor
    offsets: Tensor
    inner: Tensor
    outer: Tensor
    scaled: Tensor
    rounded: Tensor
    round_scales: Tensor


def scratch_shapes(
    num_rows: int, mixture: Mixture, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of each field of the scratch for at most `num_rows` rows of a model of `dtype`."""
    routing, first, down = mixture.routing, mixture.gate_up, mixture.down
    pairs, scales = num_rows * routing.top_k, routing.scale_input
    rounded = [
        (pairs if scales else num_rows, first.num_in, first.rounds_rows),
        (pairs, down.num_in, down.rounds_rows),
    ]
    most_codes = max(rows * width * rounds for rows, width, rounds in rounded)
    most_scales = max(rows * -(-width // linear_8bit.PIECE) * rounds for rows, width, rounds in rounded)
    return {
        "weights": ((num_rows, routing.top_k), torch.float32),
        "ids": ((num_rows, routing.top_k), torch.int32),
        "order": ((pairs,), torch.int32),
        "offsets": ((down.num_experts + 1,), torch.int32),
        "inner": ((pairs, down.num_in), dtype),
        "outer": ((pairs, down.num_out), torch.float32),
        "scaled": ((pairs * scales, first.num_in), dtype),
        "rounded": ((most_codes,), torch.uint8),
        "round_scales": ((most_scales,), torch.float32),
    }


def make_scratch(num_rows: int, mixture: Mixture, dtype: torch.dtype) -> Scratch:
    """Memory beside the weights for at most `num_rows` rows."""
    device = mixture.down.codes.device
    shapes = scratch_shapes(num_rows, mixture, dtype)
    return Scratch(**{name: torch.empty(*shape, dtype=kind, device=device) for name, (shape, kind) in shapes.items()})


def shared_memory(
    num_rows: int, mixtures: Sequence[Mixture], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return flat memory for each field of the scratch, enough for each of the mixtures."""
    most: dict[str, tuple[int, torch.dtype]] = {}
    for mixture in mixtures:
        for name, (shape, kind) in scratch_shapes(num_rows, mixture, dtype).items():
            most[name] = max(torch.Size(shape).numel(), most.get(name, (0, kind))[0]), kind
    return {name: torch.zeros(size, dtype=kind, device=device) for name, (size, kind) in most.items()}


def cut_scratch(memory: Mapping[str, Tensor], num_rows: int, mixture: Mixture, dtype: torch.dtype) -> Scratch:
    """Return the scratch as views of flat memory, at least as large for each field."""
    shapes = scratch_shapes(num_rows, mixture, dtype)
    return Scratch(**{
        name: memory[name][: torch.Size(shape).numel()].view(shape) for name, (shape, _) in shapes.items()
    })  # fmt: skip


def default(weight: Tensor, num_pairs: int) -> Config:
    """The configuration where none was measured, for the mean number of rows of an expert. weight [E, out, in]."""
    if weight.dtype == torch.float32:
        return FULL
    if weight.shape[1] % 32 or weight.shape[2] % 16:
        return GROUPED.configs[0]  # loads of single numbers, of which large tiles would spill
    mean = num_pairs / weight.shape[0]
    return next(c for c in GROUPED.configs if not c.capabilities and c.tiles["BR"] >= min(mean, 128))


def experts(
    x: Tensor,
    logits: Tensor,
    mixture: Mixture,
    out: Tensor,
    scratch: Scratch,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    num_programs: int,
    config: Config | None = None,
) -> list[Launch]:
    """Sum over a row's chosen experts, in ascending id, of weight * down(gated(gate_up(x))) -> out [R, H].

    x [R, H]; logits [R, E]. sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts, at most
    `num_rows`. num_programs: programs that the GPU runs at once. config: of the products.
    """
    routing, s, top_k = mixture.routing, scratch, mixture.routing.top_k
    hidden, num_experts, num_pairs = out.shape[1], mixture.down.num_experts, num_rows * top_k
    step = sizes, dim, num_rows
    chosen = [route(logits, routing, s.weights, s.ids, *step), group(s.ids, s.order, s.offsets, *step)]
    per_row = top_k
    if routing.scale_input:
        scaling: dict[str, Argument] = {
            "x": x, "ld_x": x.stride(0), "weights": s.weights, "out": s.scaled, "ld_out": s.scaled.stride(0),
            "sizes": sizes, "width": x.shape[1], "TOP_K": top_k, "DIM": dim,
        }  # fmt: skip
        tile = SCALE_PAIRS.configs[0]
        grid = num_pairs, triton.cdiv(x.shape[1], tile.tiles["COLUMNS"])
        chosen.append(Launch(SCALE_PAIRS, grid, scaling, tile))
        x, per_row = s.scaled, 1

    def grouped(a: Tensor, stack: Stack, target: Tensor, is_first: bool) -> list[Launch]:
        gated, data = is_first and mixture.has_gate, stack.data
        values: dict[str, Argument] = {
            "x": a, "ld_x": a.stride(0), "bias": stack.bias, "out": target, "ld_out": target.stride(0),
            "order": s.order, "offsets": s.offsets, "K": stack.num_in, "N": target.shape[1],
            "ACT": mixture.kind if is_first else "", "GATED": gated, "FIRST": is_first, "EXPERTS": num_experts,
            "BLOCK": triton.next_power_of_2(num_experts), "TOP_K": per_row if is_first else top_k,
        }  # fmt: skip
        if isinstance(data, PackedCodes):
            return [experts_codes.multiply_codes(values, data, num_pairs, num_programs, config)]
        if not isinstance(data, Tensor):
            # Rows of the second product, and of weighted inputs, are counted by the experts' last offset.
            by_row = is_first and not routing.scale_input
            count = step if by_row else (s.offsets, num_experts, num_pairs)
            return experts_codes.multiply_8bit(
                values, data, (s.rounded, s.round_scales), count, num_pairs, num_programs, config
            )
        shape = data.view(num_experts, -1, stack.num_in)
        tile = config or default(shape, num_pairs)
        values |= {"weight": data, "WHOLE": stack.num_in % tile.tiles["BK"] == 0}
        items = experts_codes.most_tiles(num_pairs, num_experts, stack.num_out, tile)
        return [Launch(GROUPED, (min(items, num_programs),), values, tile)]

    combine: dict[str, Argument] = {
        "y": s.outer, "ld_y": s.outer.stride(0), "weights": None if routing.scale_input else s.weights, "out": out,
        "ld_out": out.stride(0), "sizes": sizes, "width": hidden, "TOP_K": top_k, "DIM": dim,
    }  # fmt: skip
    columns = COMBINE.configs[0].tiles["COLUMNS"]
    return [
        *chosen,
        *grouped(x, mixture.gate_up, s.inner, True),
        *grouped(s.inner, mixture.down, s.outer, False),
        Launch(COMBINE, (num_rows, triton.cdiv(hidden, columns)), combine, COMBINE.configs[0]),
    ]
