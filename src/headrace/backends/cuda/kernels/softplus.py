"""log(1 + exp(x + bias)) of each number, held in bounds, times a factor."""

from __future__ import annotations

import math

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.rows import MOST_FLOAT
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.rowwise import elementwise


@triton.jit
def _softplus(
    x, ld_x, bias, factor, out, ld_out, sizes, width, low, high, DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    v = tl.load(x + row * ld_x + column, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    # log(1 + e) = 2 artanh(e / (2 + e)), for e from 0 to 1: the next term of the series is below 2^-27 of the sum.
    e = tl.exp(-tl.abs(v))
    z = e / (2.0 + e)
    t = z * z
    p = (((t * (1.0 / 15) + 1.0 / 13) * t + 1.0 / 11) * t + 1.0 / 9) * t + 1.0 / 7
    p = ((p * t + 1.0 / 5) * t + 1.0 / 3) * t + 1.0
    y = tl.where(v > 0, v, 0.0) + 2.0 * z * p
    bounded = tl.where(y < low, low, tl.where(y > high, high, y))
    y = tl.where(tl.abs(v) <= MOST_FLOAT, bounded, float("nan"))  # the bounds must not hide NaN and infinity
    if factor is not None:
        y = y * tl.load(factor + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * ld_out + column, y, mask=inside)


def _twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.x[:rows, : a.width].float() + a.bias.float()
    y = elementwise(F.softplus, v).clamp(a.low, a.high) + v * 0
    a.out[:rows, : a.width] = y if a.factor is None else y * a.factor.float()


KERNEL = Kernel(_softplus, _twin, (Config({"COLUMNS": 256}, 2),), fuse=False)


def softplus(
    x: Tensor,
    bias: Tensor,
    factor: Tensor | None,
    out: Tensor,
    sizes: Tensor,
    num_rows: int,
    *,
    low: float = 0.0,
    high: float = math.inf,
    dim: int = 0,
) -> Launch:
    """As `Ops.softplus`: x [R, W] -> out [R, W] float32; sizes[dim] rows, at most `num_rows`."""
    config, width = KERNEL.configs[0], out.shape[1]
    arguments: dict[str, Argument] = {
        "x": x, "ld_x": x.stride(0), "bias": bias, "factor": factor, "out": out, "ld_out": out.stride(0),
        "sizes": sizes, "width": width, "low": low, "high": high, "DIM": dim,
    }  # fmt: skip
    return Launch(KERNEL, (num_rows, triton.cdiv(width, config.tiles["COLUMNS"])), arguments, config)
