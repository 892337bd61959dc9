"""RMS norm (Zhang, Sennrich 2019) and layer norm (Ba et al. 2016) of rows, with an addition before it where needed.

One program a row, or one of the pieces that a row's norm is taken of. The order of the sums follows from the layout of
the block, so the number of warps is a function of the width, and there is no configuration to tune.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.launch import Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.rowwise import row_sums


@triton.jit
def _norm(
    x, ld_x, y, ld_y, total, ld_total, weight, weight_step, bias, out, ld_out, sizes, width, eps, offset,
    DIM: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    piece, place = tl.program_id(1), tl.arange(0, BLOCK)
    inside, column = place < width, piece * width + place
    v = tl.load(x + row * ld_x + column, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        v += tl.load(y + row * ld_y + column, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + row * ld_total + column, rounded, mask=inside)
        v = rounded.to(tl.float32)
    if CENTRED:
        v = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    if weight is not None:
        w = tl.load(weight + piece * weight_step + place, mask=inside, other=0.0).to(tl.float32)
        v = v * (w + offset)
    if bias is not None:
        v += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * ld_out + column, v.to(out.dtype.element_ty), mask=inside)


def _twin(a: Arguments) -> None:
    rows, width = int(a.sizes[a.DIM]), a.x.shape[1]
    v = a.x[:rows].float()
    if a.y is not None and a.total is not None:
        a.total[:rows, :width] = v + a.y[:rows, :width].float()
        v = a.total[:rows, :width].float()
    v = v.reshape(rows, width // a.width, a.width)
    if a.CENTRED:
        v = v - row_sums(v) / a.width
    v = v * torch.rsqrt(row_sums(v * v) / a.width + a.eps)
    if a.weight is not None:
        v = v * (a.weight.float().view(-1, a.width) + a.offset)
    v = v if a.bias is None else v + a.bias.float()
    a.out[:rows, :width] = v.flatten(1)


KERNEL = Kernel(_norm, _twin)


def norm(
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    eps: float,
    offset: float = 0.0,
    bias: Tensor | None = None,
    centred: bool = False,
    add: Tensor | None = None,
    total: Tensor | None = None,
    heads: int = 1,
) -> Launch:
    """Norm of x [R, H], or of x + add, which goes to `total` (it may be x). `out` may be x too. The sums are float32.

    sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts here, at most `num_rows`.
    heads: pieces of a row that are normed each by itself.
    weight, bias [H]; of pieces [H] or [H / heads]; no weight stands for 1. The result is
    x / sqrt(mean(x^2) + eps) * (offset + weight) + bias, of x less its mean if `centred`.
    """
    width = x.shape[1] // heads
    step = width if heads > 1 and weight is not None and weight.numel() == x.shape[1] else 0
    arguments = {
        "x": x, "ld_x": x.stride(0), "y": add, "ld_y": 0 if add is None else add.stride(0),
        "total": total, "ld_total": 0 if total is None else total.stride(0),
        "weight": weight, "weight_step": step, "bias": bias, "out": out, "ld_out": out.stride(0),
        "sizes": sizes, "width": width, "eps": eps, "offset": offset, "DIM": dim, "CENTRED": centred,
        "BLOCK": triton.next_power_of_2(width),
    }  # fmt: skip
    num_warps = 4 if width <= 4096 else 8
    return Launch(KERNEL, (num_rows, heads), arguments, Config({}, 1 if heads > 1 and width <= 512 else num_warps))
