"""Products by head: each head of a row has a matrix of its own (multi-head latent attention, arXiv 2405.04434).

One program for BN outputs of one head of BR rows. A sum goes through all inputs in order, uncut, so tiles change no
bit. The last numbers of a head may pass it by: the programs of a head's first outputs copy them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.launch import Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.rowwise import padded, products


@triton.jit
def _by_head(
    x, ld_x, weights, out, ld_out, sizes,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr, DIM: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(sizes + DIM)
    first = tl.program_id(0) * BR
    if first >= num_rows:
        return
    TILES: tl.constexpr = (NUM_OUT + BN - 1) // BN
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    row = first + tl.arange(0, BR)
    real = (row < num_rows)[:, None]
    column, inner = tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    x_row = x + row.to(tl.int64)[:, None] * ld_x + head * (NUM_IN + TAIL)
    out_row = out + row.to(tl.int64)[:, None] * ld_out + head * (NUM_OUT + TAIL)
    w_row = weights + (head.to(tl.int64) * NUM_OUT + column)[:, None] * NUM_IN
    total = tl.zeros([BR, BN], tl.float32)
    for k in tl.range(0, NUM_IN, BK):
        inside = (k + inner < NUM_IN)[None, :]
        a = tl.load(x_row + k + inner[None, :], mask=real & inside, other=0.0)
        b = tl.load(w_row + k + inner[None, :], mask=(column < NUM_OUT)[:, None] & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    tl.store(out_row + column[None, :], total.to(out.dtype.element_ty), mask=real & (column < NUM_OUT)[None, :])
    if tile == 0 and TAIL > 0:
        rest = tl.arange(0, BLOCK_TAIL)[None, :]
        numbers = tl.load(x_row + NUM_IN + rest, mask=real & (rest < TAIL), other=0.0)
        tl.store(out_row + NUM_OUT + rest, numbers, mask=real & (rest < TAIL))


def _twin(a: Arguments) -> None:
    rows, (heads, num_out, num_in) = int(a.sizes[a.DIM]), a.weights.shape
    by_head = a.x[:rows].reshape(rows, heads, num_in + a.TAIL)
    turned = torch.zeros(heads, padded(num_in), padded(num_out), device=a.x.device)
    turned[:, :num_in, :num_out] = a.weights.float().mT
    inputs = torch.zeros(rows, heads, padded(num_in), device=a.x.device)
    inputs[..., :num_in] = by_head[..., :num_in].float()
    for head in range(heads):
        first = head * (num_out + a.TAIL)
        each = products(inputs[:, head, None].contiguous(), turned[head].expand(rows, -1, -1))
        a.out[:rows, first : first + num_out] = each[:, 0, :num_out]
        a.out[:rows, first + num_out : first + num_out + a.TAIL] = by_head[:, head, num_in:]


FEW, MANY, WIDE = (
    Config({"BR": 16, "BN": 64, "BK": 64}, 4, 3),
    Config({"BR": 64, "BN": 128, "BK": 64}, 4, 3),
    Config({"BR": 16, "BN": 32, "BK": 32}, 4, 1),
)
KERNEL = Kernel(_by_head, _twin, (FEW, MANY, WIDE), fuse=False)
MOST_ROWS = 32
"""Rows up to which the small tiles are taken."""


def configs(dtype: torch.dtype) -> tuple[Config, ...]:
    """Return the configs that suit a type: without tensor cores there is one."""
    return (WIDE,) if dtype == torch.float32 else (FEW, MANY)


def by_head(
    x: Tensor,
    weights: Tensor,
    out: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    tail: int = 0,
    config: Config | None = None,
) -> Launch:
    """x [R, heads * (in + tail)] times weights [heads, out, in] -> out [R, heads * (out + tail)]; of a head's numbers
    the last `tail` follow the product as they are.

    sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts here, at most `num_rows`.
    """
    heads, num_out, num_in = weights.shape
    suited = configs(x.dtype)
    config = config or suited[num_rows > MOST_ROWS and len(suited) > 1]
    arguments = {
        "x": x, "ld_x": x.stride(0), "weights": weights, "out": out, "ld_out": out.stride(0), "sizes": sizes,
        "NUM_IN": num_in, "NUM_OUT": num_out, "TAIL": tail, "BLOCK_TAIL": triton.next_power_of_2(max(tail, 1)),
        "DIM": dim,
    }  # fmt: skip
    grid = triton.cdiv(num_rows, config.tiles["BR"]), heads * triton.cdiv(num_out, config.tiles["BN"])
    return Launch(KERNEL, grid, arguments, config)
