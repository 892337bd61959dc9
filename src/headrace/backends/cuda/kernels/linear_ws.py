"""Linear layers of many rows on Hopper (sm_90): one warp loads tiles, one or two warpgroups multiply them.

`linear` and `linear_8bit` for more rows than the weights' bandwidth bounds. Written in Gluon, where warps and barriers
are named: Triton's compiler lets all warps of a tile load, wait and multiply together. The order of K is theirs, and so
is all arithmetic after it: the bits are the same. No interpreter runs Gluon, so `trust` compares the kernel with theirs
on the GPU before it is used, and it has their twins.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels import linear as dense
from headrace.backends.cuda.kernels import linear_8bit as eight
from headrace.backends.cuda.kernels.linear import arguments, num_tiles, place, span_of
from headrace.backends.cuda.kernels.rows import activated
from headrace.backends.cuda.launch import Arguments, Config, Kernel, Launch

ROWS = gl.constexpr(64)
"""Rows that one warpgroup multiplies."""
REGISTERS = gl.constexpr(240)
"""Of a thread that multiplies; one that loads has LOADERS."""
LOADERS = gl.constexpr(24)


@gluon.jit
def _load(x, weight, x_bufs, w_bufs, v_bufs, full, empty, sizes, most_rows, K, N, DIM: gl.constexpr,
          GATED: gl.constexpr, BR: gl.constexpr, COLS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
          BAND: gl.constexpr):  # fmt: skip
    """The loading warp: the tiles of K, in order, into the buffers that are free."""
    rows = gl.minimum(gl.load(sizes + DIM), most_rows)
    row_tiles = gl.cdiv(rows, BR)
    col_tiles = gl.cdiv(N, COLS)
    count = 0
    BYTES: gl.constexpr = (BR + COLS * (2 if GATED else 1)) * BK * (x.dtype.primitive_bitwidth // 8)
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = place(tile, row_tiles, col_tiles, BAND)
        for k in range(0, K, BK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x, [row_tile * BR, k], bar, x_bufs.index(stage))
            tma.async_copy_global_to_shared(weight, [col_tile * COLS, k], bar, w_bufs.index(stage))
            if GATED:
                tma.async_copy_global_to_shared(weight, [N + col_tile * COLS, k], bar, v_bufs.index(stage))
            count += 1


@gluon.jit
def _multiply(x_bufs, w_bufs, v_bufs, full, empty, x_scales, w_scales, bias, residual, ld_residual, out, ld_out, sizes,
              most_rows, K, N, SPAN, HALF: gl.constexpr, DIM: gl.constexpr, SPANS: gl.constexpr, ACT: gl.constexpr,
              GATED: gl.constexpr, BR: gl.constexpr, COLS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
              BAND: gl.constexpr, KIN: gl.constexpr):  # fmt: skip
    """One warpgroup: ROWS rows of each tile, from HALF * ROWS on. KIN: inputs of one instruction."""
    PROMOTE: gl.constexpr = x_scales is not None
    rows = gl.minimum(gl.load(sizes + DIM), most_rows)
    row_tiles = gl.cdiv(rows, BR)
    col_tiles = gl.cdiv(N, COLS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, KIN])
    # Stores of 16 bytes of each thread, whose neighbours follow along the row.
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (16 if COLS >= 128 else 8), 16 if COLS >= 128 else 8],
                                           [4, 1], [1, 0])  # fmt: skip
    count = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = place(tile, row_tiles, col_tiles, BAND)
        acc = gl.zeros([ROWS, COLS], gl.float32, layout)
        up = gl.zeros([ROWS, COLS], gl.float32, layout)
        total = gl.zeros([ROWS, COLS], gl.float32, layout)
        total_up = gl.zeros([ROWS, COLS], gl.float32, layout)
        for span in range(SPANS):
            begin = span * SPAN
            end = gl.minimum(begin + SPAN, K)
            if PROMOTE:
                # The tensor cores sum BK products; float32 the rest.
                sums = gl.zeros([ROWS, COLS], gl.float32, layout)
                sums_up = gl.zeros([ROWS, COLS], gl.float32, layout)
                for _k in range(begin, end, BK):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    a = x_bufs.index(stage).slice(HALF * ROWS, ROWS, 0)
                    acc = warpgroup_mma(a, w_bufs.index(stage).permute((1, 0)), acc, use_acc=False, is_async=True)
                    if GATED:
                        up = warpgroup_mma(a, v_bufs.index(stage).permute((1, 0)), up, use_acc=False, is_async=True)
                        acc = warpgroup_mma_wait(1, deps=[acc])
                        sums += acc
                        up = warpgroup_mma_wait(0, deps=[up])
                        mbarrier.arrive(empty.index(stage), count=1)
                        sums_up += up
                    else:
                        acc = warpgroup_mma_wait(0, deps=[acc])
                        mbarrier.arrive(empty.index(stage), count=1)
                        sums += acc
                    count += 1
                if SPANS > 1:
                    total += sums
                    total_up += sums_up
                else:
                    total = sums
                    total_up = sums_up
            else:
                for k in range(begin, end, BK):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    a = x_bufs.index(stage).slice(HALF * ROWS, ROWS, 0)
                    acc = warpgroup_mma(a, w_bufs.index(stage).permute((1, 0)), acc, use_acc=k > begin, is_async=True)
                    if GATED:
                        up = warpgroup_mma(a, v_bufs.index(stage).permute((1, 0)), up, use_acc=k > begin, is_async=True)
                        acc, up = warpgroup_mma_wait(2, deps=[acc, up])
                    else:
                        acc = warpgroup_mma_wait(1, deps=[acc])
                    # The step before this one is done. Not across a span's end, where all were waited for.
                    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=k > begin)
                    count += 1
                if GATED:
                    acc, up = warpgroup_mma_wait(0, deps=[acc, up])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
                if SPANS > 1:
                    total += acc
                    total_up += up
                else:
                    total = acc
                    total_up = up
        row = row_tile * BR + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        col = col_tile * COLS + gl.arange(0, COLS, gl.SliceLayout(0, layout))
        if PROMOTE:
            factor = gl.load(x_scales + gl.minimum(row, rows - 1))[:, None]
            total = total * gl.load(w_scales + gl.minimum(col, N - 1))[None, :] * factor
            if GATED:
                total_up = total_up * gl.load(w_scales + N + gl.minimum(col, N - 1))[None, :] * factor
        # As in `linear.finish`, whose bits these are.
        if bias is not None:
            total += gl.load(bias + col, mask=col < N, other=0.0).to(gl.float32)[None, :]
            if GATED:
                total_up += gl.load(bias + N + col, mask=col < N, other=0.0).to(gl.float32)[None, :]
        v = activated(total, ACT)
        if GATED:
            v *= total_up
        if residual is not None:
            at = row.to(gl.int64)[:, None] * ld_residual + col[None, :]
            inside = (row < rows)[:, None] & (col < N)[None, :]
            v += gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
        w = gl.convert_layout(v.to(out.dtype.element_ty), plain)
        row = row_tile * BR + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, plain))
        col = col_tile * COLS + gl.arange(0, COLS, gl.SliceLayout(0, plain))
        at = row.to(gl.int64)[:, None] * ld_out + col[None, :]
        gl.store(out + at, w, mask=(row < rows)[:, None] & (col < N)[None, :])


@gluon.jit(do_not_specialize=["most_rows"])
def _linear_ws(x, weight, x_scales, w_scales, bias, residual, ld_residual, out, ld_out, sizes, most_rows, K, N, SPAN,
               DIM: gl.constexpr, SPANS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BK: gl.constexpr,
               BR: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr):  # fmt: skip
    COLS: gl.constexpr = BN // 2 if GATED else BN
    KIN: gl.constexpr = 256 // x.dtype.primitive_bitwidth
    x_bufs = gl.allocate_shared_memory(x.dtype, [STAGES, BR, BK], x.layout)
    w_bufs = gl.allocate_shared_memory(weight.dtype, [STAGES, COLS, BK], weight.layout)
    v_bufs = w_bufs
    if GATED:
        v_bufs = gl.allocate_shared_memory(weight.dtype, [STAGES, COLS, BK], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=BR // ROWS)
    fence_async_shared()
    if BR == 2 * ROWS:
        gl.warp_specialize([
            (_multiply, (x_bufs, w_bufs, v_bufs, full, empty, x_scales, w_scales, bias, residual, ld_residual, out,
                         ld_out, sizes, most_rows, K, N, SPAN, 0, DIM, SPANS, ACT, GATED, BR, COLS, BK, STAGES, BAND,
                         KIN)),
            (_multiply, (x_bufs, w_bufs, v_bufs, full, empty, x_scales, w_scales, bias, residual, ld_residual, out,
                         ld_out, sizes, most_rows, K, N, SPAN, 1, DIM, SPANS, ACT, GATED, BR, COLS, BK, STAGES, BAND,
                         KIN)),
            (_load, (x, weight, x_bufs, w_bufs, v_bufs, full, empty, sizes, most_rows, K, N, DIM, GATED, BR, COLS, BK,
                     STAGES, BAND)),
        ], [4, 1], [REGISTERS, LOADERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (x_bufs, w_bufs, v_bufs, full, empty, x_scales, w_scales, bias, residual, ld_residual, out,
                         ld_out, sizes, most_rows, K, N, SPAN, 0, DIM, SPANS, ACT, GATED, BR, COLS, BK, STAGES, BAND,
                         KIN)),
            (_load, (x, weight, x_bufs, w_bufs, v_bufs, full, empty, sizes, most_rows, K, N, DIM, GATED, BR, COLS, BK,
                     STAGES, BAND)),
        ], [1], [LOADERS])  # fmt: skip


def _twin(a: Arguments) -> None:
    plain = Arguments(**{**vars(a), "x": a.x.base, "weight": a.weight.base, "GROUPED": False, "TALL": 1})
    (dense.KERNEL if a.x_scales is None else eight.KERNEL).twin(plain)


def _config(rows: int, columns: int, stages: int) -> Config:
    return Config({"BR": rows, "BN": columns, "STAGES": stages, "BAND": 8}, 4, 1, (90,))


KERNEL = Kernel(
    _linear_ws,
    _twin,
    (_config(128, 128, 5), _config(128, 256, 4), _config(64, 128, 4)),
    fuse=False,
)

STEP_BYTES = 128
"""Of a row's inputs in one tile: what shared memory swizzles."""

MOST_FEW = 64
"""Rows for which `linear` is the only kernel."""
MOST_SPLIT = 128
"""Rows up to which, where spans are several, `linear` is faster: its programs share them (on an H100 4,096 outputs of
14,336 inputs take 59 µs for 128 rows, this kernel 75 for 256). It is a matter of speed."""

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def is_config(config: Config) -> bool:
    """Whether a config is one of this kernel and not of those it stands for."""
    return "STAGES" in config.tiles


def can_load(*matrices: Tensor) -> bool:
    """Whether the tensor memory accelerator takes rows [R, K] of these types: their addresses are multiples of 16
    bytes."""
    return all(
        x.dtype in TYPES
        and x.numel() > 0
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        for x in matrices
    )


def suits(config: Config, weight: Tensor, gated: bool, num_whole: int = 0) -> bool:
    """Whether the sums of an instruction, of a span and of all fit the registers, and 256 columns are stored as 128."""
    num_out, num_in = weight.shape
    nested = span_of(num_whole or num_out, num_in) < num_in
    sums = config.tiles["BN"] // 2 * (1 + nested + (weight.element_size() == 1))
    return sums <= 192 and (gated or config.tiles["BN"] == 128)


def default(weight: Tensor, num_rows: int, gated: bool = False, num_whole: int = 0) -> Config | None:
    """Return the configuration where none was measured; None where `linear` is taken to be faster."""
    num_out, num_in = weight.shape
    nested = span_of(num_whole or num_out, num_in) < num_in
    if num_rows <= (MOST_SPLIT if nested else MOST_FEW):
        return None
    wide = KERNEL.configs[1]
    return wide if suits(wide, weight, gated, num_whole) else KERNEL.configs[0]


def linear_ws(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    num_programs: int,
    scratch: dense.Scratch | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    num_whole: int = 0,
    config: Config | None = None,
    x_scales: Tensor | None = None,
    w_scales: Tensor | None = None,
) -> Launch:
    """`linear.linear` of rows and weights of 16 bits; with x_scales [1, R] and w_scales [N, 1], float32,
    `linear_8bit.linear_8bit` of both in fp8. No scratch is read.

    Raises ValueError for operands that `can_load` refuses.
    """
    if not can_load(x, weight):
        raise ValueError(
            f"x {tuple(x.stride())} or weight {tuple(weight.stride())} have no rows at multiples of 16 bytes"
        )
    config = config or default(weight, num_rows, gated, num_whole) or KERNEL.configs[0]
    tiles, num_out = config.tiles, weight.shape[0]
    depth = STEP_BYTES // weight.element_size()
    values = arguments(
        x, num_out, out, sizes, dim, num_rows, (0, 0), None, bias, residual, activation, gated, num_whole
    )
    values = {name: value for name, value in values.items() if name not in ("ld_x", "partial", "arrived")}
    values |= {
        "x": _described(x, tiles["BR"], depth), "weight": _described(weight, tiles["BN"] // (1 + gated), depth),
        "x_scales": x_scales, "w_scales": w_scales, "BK": depth,
    }  # fmt: skip
    return Launch(KERNEL, (min(num_tiles(num_out, num_rows, config), num_programs),), values, config)


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a matrix; what lies beyond its ends is 0."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], TYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)
