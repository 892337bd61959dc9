"""Grouped products of experts whose weights are codes: `experts` for all that `linear_codes` and `linear_8bit` have.

The codes of all experts are the rows of one matrix in the layout of those files, expert by expert, and stay so: for any
number of rows they become numbers of 16 bits in registers, the same that widened weights would have, and the sums have
the order of `experts`, so the bits are those of the plain product of the widened weights. Rows for fp8 weights are
rounded before each product, as in `linear_8bit`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels import linear_8bit, linear_codes
from headrace.backends.cuda.kernels.grouping import multiply_each, put, rows_at, tile_at, tiles_of
from headrace.backends.cuda.kernels.linear import sum_of_spans
from headrace.backends.cuda.kernels.linear_8bit import PIECE, EightBits
from headrace.backends.cuda.kernels.linear_8bit import _sum as sum_of_8bit
from headrace.backends.cuda.kernels.linear_codes import WIDEST, PackedCodes
from headrace.backends.cuda.kernels.linear_codes import _sum as sum_of_codes
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch


@triton.jit
def _grouped_codes(
    x, ld_x, codes, ld_codes, scales, mins, bias, out, ld_out, order, offsets, K, N, ALL,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, H: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr, EIGHT: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, UNPACK: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = BN // 2 if GATED else BN
    tiles = tiles_of(offsets, N, EXPERTS, BLOCK, BR, COLS)
    k = tl.arange(0, H)[None, :]
    program = tl.program_id(0)
    for turn in range(0, tl.sum(tiles, 0) - program, tl.num_programs(0)):
        expert, start, last, col_tile = tile_at(program + turn, offsets, tiles, BLOCK, BR)
        row = start + tl.arange(0, BR)
        x_row, out_row = rows_at(row, last, order, FIRST, TOP_K)
        col = col_tile * COLS + tl.arange(0, COLS)
        x_at = x_row.to(tl.int64)[:, None] * ld_x + k
        # Columns beyond the end repeat the last one.
        within = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)[:, None]
        q_at = within * ld_codes + k
        first = expert.to(tl.int64) * N * (2 if GATED else 1) + col_tile * COLS
        acc = tl.zeros([COLS, BR], tl.float32)
        acc_up = acc
        lower = mins
        upper = mins
        if mins is not None:
            lower = mins + first
            upper = mins + first + N
        acc = sum_of_codes(x, x_at, k, codes + first * ld_codes, q_at, scales + first, lower, within, 0, K, acc, K,
                           ALL, H, EACH, GROUPS, EIGHT, LOW, HIGH, UNPACK, WHOLE, ASM)  # fmt: skip
        if GATED:
            acc_up = sum_of_codes(x, x_at, k, codes + (first + N) * ld_codes, q_at, scales + first + N, upper, within,
                                  0, K, acc_up, K, ALL, H, EACH, GROUPS, EIGHT, LOW, HIGH, UNPACK, WHOLE,
                                  ASM)  # fmt: skip
        put(tl.trans(acc), tl.trans(acc_up), expert, row, last, out_row, col, N, bias, out, ld_out, ACT, GATED)


def _grouped_codes_twin(a: Arguments) -> None:
    weight = linear_codes._dense(a, a.x.dtype)
    multiply_each(a, lambda rows, outputs: sum_of_spans([(a.x[rows, : a.K].float(), weight[outputs].float())]))


@triton.jit
def _grouped_8bit(
    x, ld_x, x_scales, ld_x_scales, weight, ld_weight, w_scales, ld_w_scales, bias, out, ld_out, order, offsets, K, N,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, GROUPED: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = BN // 2 if GATED else BN
    tiles = tiles_of(offsets, N, EXPERTS, BLOCK, BR, COLS)
    k = tl.arange(0, BK)[None, :]
    program = tl.program_id(0)
    for turn in range(0, tl.sum(tiles, 0) - program, tl.num_programs(0)):
        expert, start, last, col_tile = tile_at(program + turn, offsets, tiles, BLOCK, BR)
        row = start + tl.arange(0, BR)
        x_row, out_row = rows_at(row, last, order, FIRST, TOP_K)
        col = col_tile * COLS + tl.arange(0, COLS)
        x_at = x_row.to(tl.int64)[:, None] * ld_x + k
        within = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)
        w_at = within[:, None] * ld_weight + k
        first = expert.to(tl.int64) * N * (2 if GATED else 1) + col_tile * COLS
        acc = tl.zeros([COLS, BR] if SWAP else [BR, COLS], tl.float32)
        none = acc
        acc_up = acc
        acc = sum_of_8bit(x, x_at, x_scales, ld_x_scales, x_row, weight + first * ld_weight, w_at,
                          w_scales + first * ld_w_scales, ld_w_scales, within, 0, K, none, K, GROUPED, WHOLE, SWAP,
                          BK)  # fmt: skip
        if GATED:
            acc_up = sum_of_8bit(x, x_at, x_scales, ld_x_scales, x_row, weight + (first + N) * ld_weight, w_at,
                                 w_scales + (first + N) * ld_w_scales, ld_w_scales, within, 0, K, none, K, GROUPED,
                                 WHOLE, SWAP, BK)  # fmt: skip
        if SWAP:
            acc = tl.trans(acc)
            acc_up = tl.trans(acc_up)
        if not GROUPED:
            factor = tl.load(x_scales + x_row)[:, None]
            acc = acc * tl.load(w_scales + first + within)[None, :] * factor
            if GATED:
                acc_up = acc_up * tl.load(w_scales + first + N + within)[None, :] * factor
        put(acc, acc_up, expert, row, last, out_row, col, N, bias, out, ld_out, ACT, GATED)


def _grouped_8bit_twin(a: Arguments) -> None:
    def product(rows: Tensor, outputs: slice) -> Tensor:
        total = torch.zeros((), device=a.x.device)
        for first in range(0, a.K, PIECE):
            columns, piece = slice(first, min(first + PIECE, a.K)), first // PIECE
            part = sum_of_spans([(a.x[rows, columns].float(), a.weight[outputs, columns].float())])
            if a.GROUPED:
                part = part * a.w_scales[outputs, piece] * a.x_scales[piece, rows, None]
            total = total + part
        return total if a.GROUPED else total * a.w_scales[outputs, 0] * a.x_scales[0, rows, None]

    multiply_each(a, product)


def _codes_tile(rows: int, columns: int, warps: int, stages: int) -> Config:
    return Config({"BR": rows, "BN": columns, "ASM": 1}, warps, stages)


def _eight_tile(rows: int, columns: int, swap: int, warps: int, stages: int) -> Config:
    return Config({"BR": rows, "BN": columns, "BK": PIECE, "SWAP": swap}, warps, stages)


GROUPED_CODES = Kernel(
    _grouped_codes,
    _grouped_codes_twin,
    (
        _codes_tile(16, 64, 4, 4),
        _codes_tile(16, 128, 4, 4),
        _codes_tile(32, 64, 4, 3),
        _codes_tile(32, 128, 4, 3),
        _codes_tile(64, 64, 4, 2),
        _codes_tile(64, 128, 8, 2),
    ),
    fuse=False,
)

GROUPED_8BIT = Kernel(
    _grouped_8bit,
    _grouped_8bit_twin,
    (
        _eight_tile(16, 64, 1, 4, 4),
        _eight_tile(16, 128, 1, 4, 4),
        _eight_tile(32, 128, 1, 4, 3),
        _eight_tile(64, 128, 1, 8, 3),
        _eight_tile(64, 128, 0, 8, 3),
        _eight_tile(128, 128, 0, 8, 3),
    ),
    fuse=False,
)


def suits_8bit(config: Config, gated: bool) -> bool:
    """Whether the first operand has the 64 rows of the instructions of sm_90 (`linear_8bit.suits`)."""
    tiles = config.tiles
    return (tiles["BN"] // (1 + gated) if tiles["SWAP"] else tiles["BR"]) >= 64


def default_codes(weight: PackedCodes, num_experts: int, num_pairs: int, gated: bool) -> Config:
    """The configuration where none was measured, for the mean number of rows of an expert."""
    rows = min(num_pairs / num_experts, 64)
    columns = 128 if rows <= 32 and (weight.step < WIDEST or weight.mins is not None) else 64
    suited = [c for c in GROUPED_CODES.configs if c.tiles["BR"] >= rows and linear_codes.suits(c, weight, gated)]
    return next(config for config in suited if config.tiles["BN"] >= columns)


def default_8bit(num_experts: int, num_pairs: int, gated: bool) -> Config:
    """The configuration where none was measured."""
    rows = min(num_pairs / num_experts, 128)
    return next(c for c in GROUPED_8BIT.configs if c.tiles["BR"] >= rows and suits_8bit(c, gated))


def most_tiles(num_pairs: int, num_experts: int, num_out: int, config: Config) -> int:
    """Return how many tiles `num_pairs` pairs have at most, whichever experts they choose."""
    row_tiles = min(num_pairs, num_pairs // config.tiles["BR"] + num_experts)
    return row_tiles * -(-num_out // config.tiles["BN"])


def multiply_codes(
    values: dict[str, Argument],
    weight: PackedCodes,
    num_pairs: int,
    num_programs: int,
    config: Config | None = None,
) -> Launch:
    """The product of rows with the codes of their experts. values: the arguments that all grouped products take."""
    num_experts, gated = int(str(values["EXPERTS"])), bool(values["GATED"])
    config = config or default_codes(weight, num_experts, num_pairs, gated)
    whole = weight.num_in % (weight.step * (1 if weight.eight else 4)) == 0
    items = most_tiles(num_pairs, num_experts, weight.num_out // num_experts, config)
    programs = min(items, num_programs * (16 // config.num_warps))
    return Launch(GROUPED_CODES, (programs,), values | weight.arguments() | {"WHOLE": whole}, config)


def multiply_8bit(
    values: dict[str, Argument],
    weight: EightBits,
    memory: tuple[Tensor, Tensor],
    count: tuple[Tensor, int, int],
    num_pairs: int,
    num_programs: int,
    config: Config | None = None,
) -> list[Launch]:
    """Round the rows of values["x"] to fp8, and multiply them with the weights of their experts.

    memory: uint8 and float32 for the rounded rows and their scales. count: sizes, dim and most rows of x.
    """
    num_experts, gated, x = int(str(values["EXPERTS"])), bool(values["GATED"]), values["x"]
    if not isinstance(x, Tensor):
        raise TypeError("x is no tensor")
    config = config or default_8bit(num_experts, num_pairs, gated)
    num_rows, num_in = count[2], weight.codes.shape[1]
    pieces = -(-num_in // PIECE) if weight.grouped else 1
    codes = memory[0][: num_rows * num_in].view(torch.float8_e4m3fn).view(num_rows, num_in)
    scales = memory[1][: pieces * num_rows].view(pieces, num_rows)
    values = values | {
        "x": codes, "ld_x": codes.stride(0), "x_scales": scales, "ld_x_scales": scales.stride(0),
        "weight": weight.codes, "ld_weight": weight.codes.stride(0), "w_scales": weight.scales,
        "ld_w_scales": weight.scales.stride(0), "GROUPED": weight.grouped, "WHOLE": num_in % PIECE == 0,
    }  # fmt: skip
    items = most_tiles(num_pairs, num_experts, weight.codes.shape[0] // num_experts, config)
    programs = min(items, num_programs * (16 // config.num_warps))
    return [
        linear_8bit.round_rows(x[:, :num_in], codes, scales, *count, grouped=weight.grouped),
        Launch(GROUPED_8BIT, (programs,), values, config),
    ]
