"""Linear layers of fp8 (e4m3) weights times rows of fp8.

A launch before it rounds the rows, with a scale for each row or for each of its pieces of 128 inputs (DeepSeek-V3,
2024, section 3.3). Scales of weights: one for each output, or for each piece of 128 inputs of one or of 128 outputs.
Tensor cores sum fp8 products in fewer bits than float32 has, so they sum 128 inputs at a time and the rest is float32.
It needs capability 90 (89 has fp8, but is not tuned for); below, fp8 weights are widened to 16 bits when loaded. Codes
of int8 are for `linear_codes`, whose rows keep their 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels import linear as dense
from headrace.backends.cuda.kernels.linear import (
    Scratch,
    arguments,
    finish,
    finished,
    in_order,
    num_spans,
    num_tiles,
    place,
    span_of,
    sum_of_spans,
)
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.quant.base import widened

PIECE = 128
"""Inputs that are summed in the tensor cores, and that share a scale where there are several."""

MOST = 448.0
LEAST = 1e-12
"""Rows of zeros have this for their largest number."""


@dataclass(frozen=True, slots=True, eq=False)
class EightBits:
    """Weights [num_out, num_in] as float8_e4m3fn, which rows rounded to the same type are multiplied with.

    scales: float32, one for each output [num_out, 1] or for each 128 inputs [num_out, num_in / 128].
    """

    codes: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def grouped(self) -> bool:
        return self.scales.shape[1] > 1

    def dense(self) -> Tensor:
        return self.codes.float().mul(widened(self.scales, PIECE, self.codes.shape[1]))


@triton.jit
def _round(
    x, ld_x, out, ld_out, scales, ld_scales, sizes, width, most, DIM: tl.constexpr, GROUPED: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    piece = tl.arange(0, PIECES)
    column = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    v = tl.load(x + row * ld_x + column, mask=column < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(v), 1)
    if not GROUPED:
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    scale = tl.div_rn(tl.maximum(largest, 1e-12), tl.zeros_like(largest) + most)
    v = tl.div_rn(v, tl.broadcast_to(scale[:, None], v.shape))
    tl.store(out + row * ld_out + column, v.to(out.dtype.element_ty), mask=column < width)
    tl.store(scales + piece * ld_scales + row, scale, mask=(piece * PIECE < width) if GROUPED else piece == 0)


def _round_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = F.pad(a.x[:rows, : a.width].float(), (0, -a.width % a.PIECE))
    v = v.unflatten(1, (-1, a.PIECE) if a.GROUPED else (1, -1))
    scale = v.abs().amax(2).clamp(min=LEAST) / torch.tensor(a.most)
    v = (v / scale[:, :, None]).flatten(1)[:, : a.width]
    a.out[:rows, : a.width] = v.to(a.out.dtype)
    a.scales[: scale.shape[1], :rows] = scale.t()


ROUND_ROWS = Kernel(_round, _round_twin, tuple(Config({}, warps) for warps in (4, 8)))


def round_rows(
    x: Tensor,
    out: Tensor,
    scales: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    grouped: bool,
    config: Config | None = None,
) -> Launch:
    """Round x [R, K] to fp8: out [R, K] times its scales is x, nearly.

    scales: float32 [pieces, most rows], of pieces of 128 inputs if `grouped`, or [1, most rows].
    """
    width = x.shape[1]
    arguments: dict[str, Argument] = {
        "x": x, "ld_x": x.stride(0), "out": out, "ld_out": out.stride(0), "scales": scales,
        "ld_scales": scales.stride(0), "sizes": sizes, "width": width, "most": MOST, "DIM": dim,
        "GROUPED": grouped, "PIECES": triton.next_power_of_2(-(-width // PIECE)), "PIECE": PIECE,
    }  # fmt: skip
    return Launch(ROUND_ROWS, (num_rows,), arguments, config or ROUND_ROWS.configs[0])


@triton.jit
def _sum(x, x_at, x_scales, ld_x_scales, row, w, w_at, w_scales, ld_w_scales, n, first, last, acc, K,
         GROUPED: tl.constexpr, WHOLE: tl.constexpr, SWAP: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Add the products of inputs first ... last - 1, in ascending order. n: where the outputs' scales begin."""
    k = tl.arange(0, BK)[None, :]
    for at in tl.range(first, last, BK):
        if WHOLE:
            a = tl.load(x + at + x_at)
            b = tl.load(w + at + w_at)
        else:
            a = tl.load(x + at + x_at, mask=at + k < K, other=0.0)
            b = tl.load(w + at + w_at, mask=at + k < K, other=0.0)
        if SWAP:
            part = tl.dot(b, tl.trans(a))
        else:
            part = tl.dot(a, tl.trans(b))
        if GROUPED:
            one = tl.load(x_scales + (at // BK) * ld_x_scales + row)
            other = tl.load(w_scales + n * ld_w_scales + at // BK)
            # The same order and one fma for both ways round.
            part *= other[:, None] if SWAP else other[None, :]
            factor = one[None, :] if SWAP else one[:, None]
            acc = tl.fma(part, tl.broadcast_to(factor, part.shape), acc)
        else:
            acc += part
    return acc


@triton.jit(do_not_specialize=["most_rows"])
def _linear_8bit(
    x, ld_x, x_scales, ld_x_scales, weight, ld_weight, w_scales, ld_w_scales, bias, residual, ld_residual, out, ld_out,
    sizes, most_rows, partial, arrived, K, N, SPAN, DIM: tl.constexpr, SPANS: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, GROUPED: tl.constexpr, TALL: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, APART: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = BN // 2 if GATED else BN
    SHARES: tl.constexpr = SPANS if APART else 1
    rows = tl.minimum(tl.load(sizes + DIM), most_rows)
    row_tiles = tl.cdiv(rows, BR)
    col_tiles = tl.cdiv(N, COLS)
    program = tl.program_id(0)
    k = tl.arange(0, BK)[None, :]
    for turn in range(0, row_tiles * col_tiles * SHARES - program, tl.num_programs(0)):
        item = program + turn
        row_tile, col_tile = place(item // SHARES, row_tiles, col_tiles, BAND)
        row = row_tile * BR + tl.arange(0, BR)
        col = col_tile * COLS + tl.arange(0, COLS)
        # Rows and columns beyond the end repeat the last one.
        row_read = tl.minimum(row, rows - 1)
        x_at = row_read[:, None] * ld_x + k
        within = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)
        w_at = within[:, None] * ld_weight + k
        first = col_tile.to(tl.int64) * COLS
        n = col_tile * COLS + within
        total = tl.zeros([COLS, BR] if SWAP else [BR, COLS], tl.float32)
        total_up = total
        none = total
        for turn_of_span in range(1 if APART else SPANS):
            span = item % SHARES if APART else turn_of_span
            begin = span * SPAN
            end = tl.minimum(begin + SPAN, K)
            sums = _sum(x, x_at, x_scales, ld_x_scales, row_read, weight + first * ld_weight, w_at, w_scales,
                        ld_w_scales, n // TALL, begin, end, none, K, GROUPED, WHOLE, SWAP, BK)  # fmt: skip
            total = sums if SHARES == SPANS else total + sums
            if GATED:
                sums = _sum(x, x_at, x_scales, ld_x_scales, row_read, weight + (first + N) * ld_weight, w_at,
                            w_scales, ld_w_scales, (n + N) // TALL, begin, end, none, K, GROUPED, WHOLE, SWAP,
                            BK)  # fmt: skip
                total_up = sums if SHARES == SPANS else total_up + sums
        if SWAP:
            total = tl.trans(total)
            total_up = tl.trans(total_up)
        inside = (row < rows)[:, None] & (col < N)[None, :]
        if SHARES > 1:
            total, total_up, last = in_order(total, total_up, partial, arrived, item, SPANS, GATED, BR, COLS)
            inside &= last
        if not GROUPED:
            factor = tl.load(x_scales + row_read)[:, None]
            total = total * tl.load(w_scales + n)[None, :] * factor
            if GATED:
                total_up = total_up * tl.load(w_scales + N + n)[None, :] * factor
        finish(total, total_up, row, col, inside, N, bias, residual, ld_residual, out, ld_out, ACT, GATED)


def _twin(a: Arguments) -> None:
    rows = min(int(a.sizes[a.DIM]), a.most_rows)
    x, weight = a.x[:rows, : a.K].float(), a.weight.float()
    pieces = [(slice(first, min(first + PIECE, a.K)), first // PIECE) for first in range(0, a.K, PIECE)]
    total = torch.zeros((), device=a.x.device)
    span = total
    for columns, piece in pieces:
        part = sum_of_spans([(x[:, columns], weight[:, columns])])
        if a.GROUPED:
            by_output = a.w_scales[:, piece].repeat_interleave(a.TALL)[: a.weight.shape[0]]
            part = part * by_output[None] * a.x_scales[piece, :rows, None]
        span = span + part
        if (columns.start + PIECE) % a.SPAN == 0 or columns.stop == a.K:
            total, span = total + span, torch.zeros((), device=a.x.device)
    if not a.GROUPED:
        total = total * a.w_scales.view(-1)[None] * a.x_scales[0, :rows, None]
    a.out[:rows, : a.N] = finished(total, a.bias, a.residual, a.N, a.ACT, a.GATED)


def _config(rows: int, columns: int, swap: int, warps: int, stages: int, *capabilities: int) -> Config:
    tiles = {"BR": rows, "BN": columns, "BK": PIECE, "SWAP": swap, "APART": swap, "BAND": 1 if swap else 8}
    return Config(tiles, warps, stages, capabilities)


KERNEL = Kernel(
    _linear_8bit,
    _twin,
    (
        _config(16, 64, 1, 4, 4),
        _config(16, 128, 1, 4, 4),
        _config(32, 128, 1, 4, 3),
        _config(64, 128, 1, 8, 3),
        _config(64, 128, 0, 8, 3),
        _config(128, 128, 0, 8, 3),
        _config(128, 64, 0, 8, 3),
    ),
    fuse=False,
)


def suits(config: Config, weight: Tensor, gated: bool, grouped: bool, num_whole: int = 0) -> bool:
    """Whether the sums fit the registers, and the tile the instructions of sm_90, which have 64 rows: with fewer the
    compiler takes those for float16, whose sums have other bits."""
    tiles, (num_out, num_in) = config.tiles, weight.shape
    nested = not tiles["APART"] and span_of(num_whole or num_out, num_in) < num_in
    sums = tiles["BR"] * tiles["BN"] // (32 * config.num_warps)
    first_operand = tiles["BN"] // (1 + gated) if tiles["SWAP"] else tiles["BR"]
    return first_operand >= 64 and not (nested and grouped and sums >= 64)


def default(weight: Tensor, num_rows: int, gated: bool, grouped: bool, num_whole: int = 0) -> Config:
    """The configuration where none was measured."""
    rows = next((rows for rows in (16, 32, 64) if num_rows <= rows), 128)
    return next(c for c in KERNEL.configs if c.tiles["BR"] == rows and suits(c, weight, gated, grouped, num_whole))


def linear_8bit(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
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
    """act(x [R, K] weight [N, K]^T, both times their scales, + bias [N]) + residual [R, N] -> out [R, N].

    x and weight are float8_e4m3fn. x_scales as `round_rows` writes them. w_scales: float32 [N, 1]
    with x_scales [1, R], else [N or ceil(N / 128), ceil(K / 128)]. For the others see `linear.linear`.
    """
    grouped = x_scales.shape[0] > 1 or w_scales.shape[1] > 1
    config = config or default(weight, num_rows, gated, grouped, num_whole)
    needed = dense.scratch_numbers(weight, num_rows, config, num_whole)
    num_out, num_in = weight.shape
    num_shares = num_spans(num_whole or num_out, num_in) if config.tiles["APART"] else 1
    items = num_tiles(num_out, num_rows, config) * num_shares
    values = arguments(
        x, num_out, out, sizes, dim, num_rows, needed, scratch, bias, residual, activation, gated, num_whole
    )
    values |= {
        "x_scales": x_scales, "ld_x_scales": x_scales.stride(0), "weight": weight, "ld_weight": weight.stride(0),
        "w_scales": w_scales, "ld_w_scales": w_scales.stride(0), "GROUPED": grouped,
        "TALL": 1 if w_scales.shape[0] == num_out else PIECE, "WHOLE": num_in % PIECE == 0,
    }  # fmt: skip
    return Launch(KERNEL, (min(items, num_programs * (16 // config.num_warps)),), values, config)
