"""RMS norm (Zhang, Sennrich 2019) and layer norm (Ba et al. 2016) of rows, with an addition before it where needed.

One program a row. The order of a row's sums follows from the layout of its block, so the number of warps is a function
of the width, and there is no configuration to tune.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.launch import Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.rowwise import row_sums


@triton.jit
def _norm(
    x, ld_x, y, ld_y, total, ld_total, weight, bias, out, ld_out, sizes, width, eps, offset,
    DIM: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    column = tl.arange(0, BLOCK)
    inside = column < width
    v = tl.load(x + row * ld_x + column, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        v += tl.load(y + row * ld_y + column, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + row * ld_total + column, rounded, mask=inside)
        v = rounded.to(tl.float32)
    if CENTRED:
        v = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    v = v * (w + offset)
    if bias is not None:
        v += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * ld_out + column, v.to(out.dtype.element_ty), mask=inside)


def _twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.x[:rows, : a.width].float()
    if a.y is not None and a.total is not None:
        a.total[:rows, : a.width] = v + a.y[:rows, : a.width].float()
        v = a.total[:rows, : a.width].float()
    if a.CENTRED:
        v = v - row_sums(v) / a.width
    v = v * torch.rsqrt(row_sums(v * v) / a.width + a.eps) * (a.weight.float() + a.offset)
    a.out[:rows, : a.width] = v if a.bias is None else v + a.bias.float()


KERNEL = Kernel(_norm, _twin)


def norm(
    x: Tensor,
    weight: Tensor,
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
) -> Launch:
    """Norm of x [R, H], or of x + add, which goes to `total` (it may be x). The sums are float32.

    sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts here, at most `num_rows`.
    weight, bias [H]. The result is x / sqrt(mean(x^2) + eps) * (offset + weight) + bias, of x less its mean if
    `centred`.
    """
    width = weight.shape[0]
    arguments = {
        "x": x, "ld_x": x.stride(0), "y": add, "ld_y": 0 if add is None else add.stride(0),
        "total": total, "ld_total": 0 if total is None else total.stride(0),
        "weight": weight, "bias": bias, "out": out, "ld_out": out.stride(0), "sizes": sizes, "width": width,
        "eps": eps, "offset": offset, "DIM": dim, "CENTRED": centred, "BLOCK": triton.next_power_of_2(width),
    }  # fmt: skip
    return Launch(KERNEL, (num_rows,), arguments, Config({}, 4 if width <= 4096 else 8))
