"""The activation xIELU of each number (Huang et al. 2024, "Deriving activation functions via integration")."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.rows import CONFIGS
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.rowwise import elementwise


@triton.jit
def _xielu(
    x, ld_x, out, ld_out, sizes, width, positive, negative, beta, DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    v = tl.load(x + row * ld_x + column, mask=inside, other=0.0).to(tl.float32)
    # exp(v) - 1 - v: near 0 by its series, where the difference would cancel.
    near = (((v / 7.0 + 1.0) * v / 6.0 + 1.0) * v / 5.0 + 1.0) * v / 4.0 + 1.0
    near = (near * v / 3.0 + 1.0) * v * v * 0.5
    far = tl.exp(tl.where(v > 0.0, 0.0, v)) - 1.0 - v
    bent = tl.where(v > -0.5, near, far) * negative
    bent = tl.where(v > 0.0, positive * v * v, bent)
    tl.store(out + row * ld_out + column, (beta * v + bent).to(out.dtype.element_ty), mask=inside)


def _twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    v = a.x[:rows, : a.width].float()
    low = elementwise(torch.expm1, v.clamp(max=0)) - v
    a.out[:rows, : a.width] = a.beta * v + torch.where(v > 0, a.positive * v * v, a.negative * low)


KERNEL = Kernel(_xielu, _twin, CONFIGS, fuse=False)


def xielu(
    x: Tensor,
    out: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    positive: float,
    negative: float,
    beta: float,
    config: Config | None = None,
) -> Launch:
    """beta * x + positive * x^2 where x > 0, else beta * x + negative * (exp(x) - 1 - x) -> out [R, W].

    sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts here, at most `num_rows`.
    """
    config = config or CONFIGS[0]
    arguments: dict[str, Argument] = {
        "x": x, "ld_x": x.stride(0), "out": out, "ld_out": out.stride(0), "sizes": sizes, "width": out.shape[1],
        "positive": positive, "negative": negative, "beta": beta, "DIM": dim,
    }  # fmt: skip
    return Launch(KERNEL, (num_rows, triton.cdiv(out.shape[1], config.tiles["COLUMNS"])), arguments, config)
