"""Linear layers: out [R, N] = x [R, K] times weights [N, K], with bias, gate and residual after it.

For few rows the weights are the first operand of the instruction and the rows are padded to 16; for many it is the
usual way round. Programs stay and take one tile after the other. K is summed in spans, whose ends are set by the
matrix's shape alone, and the spans' sums are added in order: by one program, or, where that gives too few programs,
by the last of several to arrive (split K; Osama et al. 2023, Stream-K, is the general case).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.kernels.rows import activated
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.ops import ACTIVATIONS
from headrace.backends.torch_ref.rowwise import elementwise, padded, products


@triton.jit
def place(tile, row_tiles, col_tiles, BAND: tl.constexpr):
    """Row and column of a tile: BAND rows of tiles are done column by column, so that both operands stay in L2."""
    band = tile // (BAND * col_tiles)
    within = tile % (BAND * col_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    return band * BAND + within % height, within // height


@triton.jit
def _sum(x, x_at, w, w_at, v, first, last, acc, acc_up, GATED: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
         WHOLE: tl.constexpr):  # fmt: skip
    """Add the products of columns first ... last - 1 of K, in ascending order."""
    k = tl.arange(0, BK)[None, :]
    for at in tl.range(first, last, BK):
        if WHOLE:
            a = tl.load(x + at + x_at)
            b = tl.load(w + at + w_at)
            if GATED:
                c = tl.load(v + at + w_at)
        else:
            inside = at + k < last
            a = tl.load(x + at + x_at, mask=inside, other=0.0)
            b = tl.load(w + at + w_at, mask=inside, other=0.0)
            if GATED:
                c = tl.load(v + at + w_at, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
            if GATED:
                acc_up = tl.dot(c, tl.trans(a), acc_up, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
            if GATED:
                acc_up = tl.dot(a, tl.trans(c), acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def finish(acc, acc_up, row, col, inside, N, bias, residual, ld_residual, out, ld_out, ACT: tl.constexpr,
           GATED: tl.constexpr):  # fmt: skip
    """Add, activate and store a tile of sums [rows, columns]."""
    if bias is not None:
        acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    v = activated(acc, ACT)
    if GATED:
        v *= acc_up
    at = row.to(tl.int64)[:, None]
    if residual is not None:
        v += tl.load(residual + at * ld_residual + col[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at * ld_out + col[None, :], v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def in_order(acc, acc_up, partial, arrived, item, SPANS: tl.constexpr, GATED: tl.constexpr,
             ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Leave a span's sums in memory; the last program of a tile adds all of them in order. -> sums, whether last."""
    NUMBERS: tl.constexpr = ROWS * COLS * (2 if GATED else 1)
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    parts = partial + item.to(tl.int64) * NUMBERS
    tl.store(parts + at, acc)
    if GATED:
        tl.store(parts + ROWS * COLS + at, acc_up)
    tl.debug_barrier()
    tile = item // SPANS
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPANS - 1
    if last:
        tl.store(arrived + tile, 0)
        acc = tl.zeros_like(acc)
        acc_up = tl.zeros_like(acc_up)
        start = partial + tile.to(tl.int64) * SPANS * NUMBERS
        for span in range(SPANS):
            acc += tl.load(start + span * NUMBERS + at, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(start + span * NUMBERS + ROWS * COLS + at, cache_modifier=".cg")
    return acc, acc_up, last


@triton.jit(do_not_specialize=["most_rows"])
def _linear(
    x, ld_x, weight, ld_weight, bias, residual, ld_residual, out, ld_out, sizes, most_rows, partial, arrived, K, N,
    SPAN, DIM: tl.constexpr, SPANS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, APART: tl.constexpr,
    BAND: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    COLS: tl.constexpr = BN // 2 if GATED else BN
    SHARES: tl.constexpr = SPANS if APART else 1
    # Scratch has room for the rows of the launch's bucket alone.
    rows = tl.minimum(tl.load(sizes + DIM), most_rows)
    row_tiles = tl.cdiv(rows, BR)
    col_tiles = tl.cdiv(N, COLS)
    k = tl.arange(0, BK)[None, :]
    program = tl.program_id(0)
    for turn in range(0, row_tiles * col_tiles * SHARES - program, tl.num_programs(0)):
        item = program + turn
        row_tile, col_tile = place(item // SHARES, row_tiles, col_tiles, BAND)
        row = row_tile * BR + tl.arange(0, BR)
        col = col_tile * COLS + tl.arange(0, COLS)
        # Rows and columns beyond the end repeat the last one: nothing is read behind it, and loads have no mask.
        x_at = tl.minimum(row, rows - 1)[:, None] * ld_x + k
        first = col_tile.to(tl.int64) * COLS
        w_at = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)[:, None] * ld_weight + k
        w = weight + first * ld_weight
        v = w
        if GATED:
            v = w + N.to(tl.int64) * ld_weight
        acc = tl.zeros([COLS, BR] if SWAP else [BR, COLS], tl.float32)
        acc_up = acc
        if SHARES > 1 or SPANS == 1:
            begin = (item % SHARES) * SPAN
            end = tl.minimum(begin + SPAN, K)
            acc, acc_up = _sum(x, x_at, w, w_at, v, begin, end, acc, acc_up, GATED, BK, SWAP, WHOLE)
        else:
            none = acc
            for span in range(SPANS):
                begin = span * SPAN
                end = tl.minimum(begin + SPAN, K)
                one, one_up = _sum(x, x_at, w, w_at, v, begin, end, none, none, GATED, BK, SWAP, WHOLE)
                acc += one
                acc_up += one_up
        if SWAP:
            acc = tl.trans(acc)
            acc_up = tl.trans(acc_up)
        inside = (row < rows)[:, None] & (col < N)[None, :]
        if SHARES > 1:
            acc, acc_up, last = in_order(acc, acc_up, partial, arrived, item, SPANS, GATED, BR, COLS)
            inside &= last
        finish(acc, acc_up, row, col, inside, N, bias, residual, ld_residual, out, ld_out, ACT, GATED)


def _twin(a: Arguments) -> None:
    rows = min(int(a.sizes[a.DIM]), a.most_rows)
    spans = [(first, min(first + a.SPAN, a.K)) for first in range(0, a.K, a.SPAN)]
    v = sum_of_spans([(a.x[:rows, first:last].float(), a.weight[:, first:last].float()) for first, last in spans])
    a.out[:rows, : a.N] = finished(v, a.bias, a.residual, a.N, a.ACT, a.GATED)


def sum_of_spans(spans: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Products x [R, K'] times weights [N, K'] of each span, added in order."""
    total = torch.zeros(())
    for a, b in spans:
        extra = (0, padded(a.shape[1]) - a.shape[1])
        wide = F.pad(b, (*extra, 0, padded(b.shape[0]) - b.shape[0])).t().contiguous()
        total = total.to(a.device) + products(F.pad(a, extra)[:, None], wide.expand(a.shape[0], -1, -1))[:, 0]
    return total[:, : spans[0][1].shape[0]]


def finished(v: Tensor, bias: Tensor | None, residual: Tensor | None, N: int, ACT: str, GATED: bool) -> Tensor:
    """The last operation of the kernel on the sums before it stores them."""
    if bias is not None:
        v = v + bias.float()
    up = v[:, N:]
    v = v[:, :N]
    if ACT:
        v = elementwise(ACTIVATIONS[ACT], v)
    if GATED:
        v = v * up
    return v if residual is None else v + residual[: len(v), :N].float()


class Scratch(NamedTuple):
    """Memory that launches share: sums of spans (float32), and programs arrived (int32, 0 between launches)."""

    partial: Tensor
    arrived: Tensor


def holds(scratch: Scratch, needed: tuple[int, int]) -> bool:
    return scratch.partial.numel() >= needed[0] and scratch.arrived.numel() >= needed[1]


def _few(rows: int, columns: int, depth: int, warps: int, stages: int, *capabilities: int) -> Config:
    tiles = {"BR": rows, "BN": columns, "BK": depth, "SWAP": 1, "APART": 1, "BAND": 1}
    return Config(tiles, warps, stages, capabilities)


def _many(rows: int, columns: int, depth: int, warps: int, stages: int, *capabilities: int) -> Config:
    tiles = {"BR": rows, "BN": columns, "BK": depth, "SWAP": 0, "APART": 0, "BAND": 8}
    return Config(tiles, warps, stages, capabilities)


KERNEL = Kernel(
    _linear,
    _twin,
    (
        _few(16, 64, 128, 4, 4),
        _few(16, 128, 64, 4, 4),
        _few(16, 128, 128, 4, 4, 80, 90, 100),
        _few(32, 64, 128, 4, 3),
        _few(32, 128, 64, 4, 4),
        _few(64, 128, 64, 4, 3),
        _few(64, 128, 64, 4, 4, 80, 90, 100),
        _many(64, 128, 64, 4, 3),
        _many(128, 128, 64, 8, 3),
        _many(128, 128, 64, 8, 4, 80, 90, 100),
        _many(128, 256, 64, 8, 3, 90, 100),
        _many(128, 256, 64, 8, 4, 90, 100),
    ),
    fuse=False,  # or the compiler could fuse other operations of the epilogue in other configurations
)

FULL = Config({"BR": 16, "BN": 32, "BK": 32, "SWAP": 0, "APART": 1, "BAND": 1}, 4, 2)
"""For float32, which has no tensor cores here: correct, and slow."""

SPAN_STEP = 256
"""Ends of spans are multiples of it, hence of every BK."""
SPAN_LEAST = 512
PROGRAMS = 256
"""Tiles of 64 columns times spans, at least: enough for two programs on each multiprocessor of an H100 or H200."""


def span_of(num_out: int, num_in: int) -> int:
    """Inputs that are summed before they are added to the others. A function of the matrix: it is part of the bits."""
    spans = max(min(PROGRAMS // -(-num_out // 64), num_in // SPAN_LEAST), 1)
    return -(-num_in // (spans * SPAN_STEP)) * SPAN_STEP


def num_spans(num_out: int, num_in: int) -> int:
    return -(-num_in // span_of(num_out, num_in))


def suits(config: Config, weight: Tensor, num_whole: int = 0) -> bool:
    """Whether the sums of a span and of all fit the registers."""
    tiles, (num_out, num_in) = config.tiles, weight.shape
    nested = not tiles["APART"] and span_of(num_whole or num_out, num_in) < num_in
    sums = tiles["BR"] * tiles["BN"] * (1 + nested) / (32 * config.num_warps)
    return (config is FULL) == (weight.dtype == torch.float32) and sums <= 128


def default(weight: Tensor, num_rows: int, gated: bool = False, num_whole: int = 0) -> Config:
    """The configuration where none was measured. Both halves of a gated tile have the 64 columns of an instruction."""
    if weight.dtype == torch.float32:
        return FULL
    rows = next((rows for rows in (16, 32, 64) if num_rows <= rows), 128)
    columns = 128 if gated else 64
    suited = [config for config in KERNEL.configs if not config.capabilities and suits(config, weight, num_whole)]
    return next(config for config in suited if config.tiles["BR"] == rows and config.tiles["BN"] >= columns)


def scratch_numbers(weight: Tensor, num_rows: int, config: Config, num_whole: int = 0) -> tuple[int, int]:
    """Return how many numbers `Scratch.partial` and `Scratch.arrived` must hold for a launch."""
    num_out, num_in = weight.shape
    tiles, spans = num_tiles(num_out, num_rows, config), num_spans(num_whole or num_out, num_in)
    if spans == 1 or not config.tiles.get("APART"):
        return 0, 0
    return tiles * spans * config.tiles["BR"] * config.tiles["BN"], tiles


def num_tiles(num_out: int, num_rows: int, config: Config) -> int:
    return -(-num_rows // config.tiles["BR"]) * -(-num_out // config.tiles["BN"])


def arguments(
    x: Tensor, num_out: int, out: Tensor, sizes: Tensor, dim: int, num_rows: int, needed: tuple[int, int],
    scratch: Scratch | None, bias: Tensor | None, residual: Tensor | None, activation: Activation | None, gated: bool,
    num_whole: int,
) -> dict[str, Argument]:  # fmt: skip
    """Return the arguments that all kernels of linear layers take. Raises ValueError for scratch of less than `needed`
    numbers."""
    if any(needed) and (scratch is None or not holds(scratch, needed)):
        raise ValueError(f"scratch is too small: {needed} numbers are needed")
    partial, arrived = (None, None) if scratch is None else scratch
    num_in, num_whole = x.shape[1], num_whole or num_out
    return {
        "x": x, "ld_x": x.stride(0), "bias": bias, "residual": residual,
        "ld_residual": 0 if residual is None else residual.stride(0), "out": out, "ld_out": out.stride(0),
        "sizes": sizes, "most_rows": num_rows, "partial": partial, "arrived": arrived, "K": num_in,
        "N": num_out // 2 if gated else num_out, "SPAN": span_of(num_whole, num_in), "DIM": dim,
        "SPANS": num_spans(num_whole, num_in), "ACT": activation or "", "GATED": gated,
    }  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    num_programs: int,
    scratch: Scratch | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    num_whole: int = 0,
    config: Config | None = None,
) -> Launch:
    """act(x [R, K] weight [N, K]^T + bias [N]) + residual [R, N] -> out [R, N], sums in float32.

    gated: weight [2 N, K], and out = act(first half) * second half. out may be the residual, and float32. sizes: int32
    in device memory; `sizes[dim]` rows count, and no more than `num_rows` of them. num_programs: multiprocessors of the
    GPU. scratch: at least `scratch_numbers`, where these are not 0. num_whole: outputs of the matrix that weight is a
    part of, whose spans it has; 0: it is no part.
    """
    config = config or default(weight, num_rows, gated, num_whole)
    needed = scratch_numbers(weight, num_rows, config, num_whole)
    (num_out, num_in), tiles = weight.shape, config.tiles
    items = num_tiles(num_out, num_rows, config) * (num_spans(num_whole or num_out, num_in) if tiles["APART"] else 1)
    values = arguments(
        x, num_out, out, sizes, dim, num_rows, needed, scratch, bias, residual, activation, gated, num_whole
    )
    values |= {"weight": weight, "ld_weight": weight.stride(0), "WHOLE": num_in % tiles["BK"] == 0}
    return Launch(KERNEL, (min(items, num_programs * _resident(config, weight.element_size())),), values, config)


def _resident(config: Config, item_bytes: int) -> int:
    """Programs that a multiprocessor of an H200 holds at once, if each thread has 128 registers."""
    tiles = config.tiles
    shared = (tiles["BR"] + tiles["BN"]) * tiles["BK"] * item_bytes * config.num_stages
    return max(min(232_448 // shared, 16 // config.num_warps), 1)
