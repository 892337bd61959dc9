"""Operators that take rows as they are: gather, add, activations, soft cap, the check for NaN.

One program for COLUMNS numbers of one row. Each number of a result depends on its own operands alone, so tiles change
no bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.ops import ACTIVATIONS
from headrace.backends.torch_ref.rowwise import elementwise

MOST_FLOAT = tl.constexpr(3.4028234663852886e38)

CONFIGS = tuple(Config({"COLUMNS": columns}, warps) for columns, warps in ((1024, 4), (512, 2)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), with a relative error of at most (8 + |x|) * 2^-24."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """Hyperbolic tangent with a relative error of at most 2^-21.

    Below 0.625 the polynomial of Cephes, where 1 - 2 / (exp(2x) + 1) would cancel.
    """
    z = x * x
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = x + x * z * (p - 3.33332819422e-1)
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(z < 0.390625, near, tl.where(x < 0, -far, far))


@triton.jit
def gauss(x):
    """The normal distribution function, with a relative error of at most (1 + x^2) * 2^-20.

    From erfc(z) = t * exp(-z^2 + polynomial in t), t = 1 / (1 + z / 2) (Press et al., Numerical Recipes, 6.2).
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    p = ((0.17087277 * t - 0.82215223) * t + 1.48851587) * t - 1.13520398
    p = (((p * t + 0.27886807) * t - 0.18628806) * t + 0.09678418) * t + 0.37409196
    p = (p * t + 1.00002368) * t - 1.26551223
    half = 0.5 * t * tl.exp(p - z * z)
    return tl.where(x >= 0, 1.0 - half, half)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation KIND of `x`, float32. gelu_tanh is x * sigmoid(2u), since 1 + tanh(u) = 2 * sigmoid(2u)."""
    if KIND == "silu":
        x = x * sigmoid(x)
    elif KIND == "gelu":
        x = x * gauss(x)
    elif KIND == "gelu_tanh":
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif KIND == "sigmoid":
        x = sigmoid(x)
    elif KIND == "relu2":
        x = tl.where(x < 0, 0.0, x * x)
    return x


@triton.jit
def _same(x):
    return x


@triton.jit
def opaque(x):
    """`x` as it is, so that the compiler does not see how it was made.

    An operand of the tensor cores that was loaded as 8 bits gets another layout (`kWidth`): each instruction sums other
    K, and the sums have other bits."""
    return tl.map_elementwise(_same, x)


@triton.jit
def _gather(
    x, ld_x, ids, out, ld_out, sizes, width, scale, DIM: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr = 0
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    source = tl.load(ids + row).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    v = tl.load(x + source * ld_x + column, mask=inside).to(tl.float32)
    tl.store(out + row * ld_out + column, (v * scale).to(out.dtype.element_ty), mask=inside)


def _gather_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    a.out[:rows, : a.width] = a.x[a.ids[:rows].long(), : a.width].float() * a.scale


@triton.jit
def _map(
    x, ld_x, y, ld_y, out, ld_out, sizes, width, cap,
    KIND: tl.constexpr, PLUS: tl.constexpr, ONE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    # ONE: the row of x is one number, which goes with all of y.
    v = tl.load(x + row * ld_x + (column * 0 if ONE else column), mask=inside, other=0.0).to(tl.float32)
    if KIND == "softcap":
        v = cap * tanh(v / cap)
    elif KIND == "scale":
        v = cap * v
    else:
        v = activated(v, KIND)
    if y is not None:
        w = tl.load(y + row * ld_y + column, mask=inside, other=0.0).to(tl.float32)
        v = v + w if PLUS else v * w
    tl.store(out + row * ld_out + column, v.to(out.dtype.element_ty), mask=inside)


def _map_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.x[:rows, : 1 if a.ONE else a.width].float()
    if a.KIND == "softcap":
        v = elementwise(torch.tanh, v / a.cap) * a.cap
    elif a.KIND == "scale":
        v = a.cap * v
    elif a.KIND in ACTIVATIONS:
        v = elementwise(ACTIVATIONS[a.KIND], v)
    if a.y is not None:
        w = a.y[:rows, : a.width].float()
        v = v + w if a.PLUS else v * w
    a.out[:rows, : a.width] = v


@triton.jit
def _finite(x, ld_x, out, sizes, width, DIM: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr = 0):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    good = tl.full([COLUMNS], 1, tl.int32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        v = tl.load(x + row * ld_x + column, mask=column < width, other=0.0).to(tl.float32)
        good = good & (tl.abs(v) <= MOST_FLOAT).to(tl.int32)
    tl.store(out + row, tl.min(good, 0))


def _finite_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    a.out[:rows] = a.x[:rows, : a.width].isfinite().all(-1).int()


GATHER = Kernel(_gather, _gather_twin, CONFIGS)
MAP = Kernel(_map, _map_twin, CONFIGS, fuse=False)
FINITE = Kernel(_finite, _finite_twin, CONFIGS)


def embedding(
    ids: Tensor, table: Tensor, out: Tensor, sizes: Tensor, num_rows: int, scale: float = 1.0,
    config: Config | None = None,
) -> Launch:  # fmt: skip
    """Rows `ids` [R] of table [V, H] -> out [R, H], times `scale` rounded to out's dtype.

    sizes: int32, numbers of rows in device memory; sizes[0] counts here, at most `num_rows`.
    """
    factor = float(torch.tensor(scale, dtype=out.dtype))
    return _gathered(table, ids, out, sizes, 0, num_rows, factor, config)


def select(x: Tensor, rows: Tensor, out: Tensor, sizes: Tensor, num_rows: int, config: Config | None = None) -> Launch:
    """Rows `rows` [S] of x [R, H] -> out [S, H]; sizes[2] of them, at most `num_rows`."""
    return _gathered(x, rows, out, sizes, 2, num_rows, 1.0, config)


def activation(
    x: Tensor, kind: Activation, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0, config: Config | None = None
) -> Launch:
    """kind(x [R, W]) -> out [R, W], which may be x; sizes[dim] rows."""
    return _mapped(x, None, out, sizes, dim, num_rows, kind, config=config)


def gated(
    x: Tensor, kind: Activation, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0, config: Config | None = None
) -> Launch:
    """kind(x[:, :I]) * x[:, I:] -> out [R, I] (Shazeer 2020); sizes[dim] rows."""
    width = x.shape[1] // 2
    return _mapped(x[:, :width], x[:, width:], out, sizes, dim, num_rows, kind, config=config)


def add(
    x: Tensor, y: Tensor, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0, config: Config | None = None
) -> Launch:
    """x + y -> out [R, W], which may be one of them; sizes[dim] rows."""
    return _mapped(x, y, out, sizes, dim, num_rows, "plus", config=config)


def multiply(
    x: Tensor, gate: Tensor, kind: Activation, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0,
    config: Config | None = None,
) -> Launch:  # fmt: skip
    """x [R, W] * kind(gate [R, W] or [R, 1]) -> out [R, W], which may be x; sizes[dim] rows."""
    return _mapped(gate, x, out, sizes, dim, num_rows, kind, config=config)


def scale(
    x: Tensor, factor: float, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0, config: Config | None = None
) -> Launch:
    """factor * x -> out [R, W], which may be x; sizes[dim] rows."""
    return _mapped(x, None, out, sizes, dim, num_rows, "scale", cap=factor, config=config)


def softcap(
    x: Tensor, cap: float, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0, config: Config | None = None
) -> Launch:
    """cap * tanh(x / cap) -> out [R, W], which may be x; sizes[dim] rows."""
    return _mapped(x, None, out, sizes, dim, num_rows, "softcap", cap=cap, config=config)


def finite(x: Tensor, out: Tensor, sizes: Tensor, num_rows: int, dim: int = 0, config: Config | None = None) -> Launch:
    """Whether all numbers of a row of x [R, W] are finite -> out int32 [R]; sizes[dim] rows."""
    arguments: dict[str, Argument] = {
        "x": x,
        "ld_x": x.stride(0),
        "out": out,
        "sizes": sizes,
        "width": x.shape[1],
        "DIM": dim,
    }
    return Launch(FINITE, (num_rows,), arguments, config or FINITE.configs[0])


def _gathered(
    x: Tensor, ids: Tensor, out: Tensor, sizes: Tensor, dim: int, num_rows: int, scale: float, config: Config | None
) -> Launch:
    config = config or GATHER.configs[0]
    width = x.shape[1]
    arguments: dict[str, Argument] = {
        "x": x, "ld_x": x.stride(0), "ids": ids, "out": out, "ld_out": out.stride(0), "sizes": sizes, "width": width,
        "scale": scale, "DIM": dim,
    }  # fmt: skip
    return Launch(GATHER, (num_rows, triton.cdiv(width, config.tiles["COLUMNS"])), arguments, config)


def _mapped(
    x: Tensor, y: Tensor | None, out: Tensor, sizes: Tensor, dim: int, num_rows: int, kind: str, *,
    cap: float = 0.0, config: Config | None,
) -> Launch:  # fmt: skip
    config = config or MAP.configs[0]
    width = out.shape[1]
    arguments: dict[str, Argument] = {
        "x": x, "ld_x": x.stride(0), "y": y, "ld_y": 0 if y is None else y.stride(0), "out": out,
        "ld_out": out.stride(0), "sizes": sizes, "width": width, "cap": cap, "KIND": "none" if kind == "plus" else kind,
        "PLUS": kind == "plus",
        "ONE": x.shape[1] < width, "DIM": dim,
    }  # fmt: skip
    return Launch(MAP, (num_rows, triton.cdiv(width, config.tiles["COLUMNS"])), arguments, config)
