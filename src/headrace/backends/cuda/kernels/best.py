"""The likeliest token of each row of logits, and whether the row is fit to be sampled from.

One program a row: each lane keeps the greatest of its columns in ascending order, then the lanes are compared, so the
lowest of equal tokens wins whatever the width of the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch


@triton.jit
def _best(logits, ld, ids, values, finite, sizes, width, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    lane = tl.arange(0, BLOCK)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    place = lane
    faults = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, width, BLOCK):
        column = start + lane
        x = tl.load(logits + row * ld + column, mask=column < width, other=float("-inf"))
        unfit = (x != x) | (x == float("inf"))
        faults = tl.where(unfit, 1, faults)
        better = x > greatest  # false for NaN
        place = tl.where(better, column, place)
        greatest = tl.where(better, x, greatest)
    most = tl.max(greatest, 0)
    tl.store(ids + row, tl.min(tl.where(greatest == most, place, width), 0))
    tl.store(values + row, most)
    tl.store(finite + row, 1 - tl.max(faults, 0))


def _twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    x = a.logits[:rows, : a.width]
    a.finite[:rows] = ~(x.isnan() | (x == torch.inf)).any(-1)
    # torch returns any of equal places: the first is the least column that holds the greatest.
    numbers = torch.where(x.isnan(), -torch.inf, x)
    a.values[:rows] = numbers.amax(-1)
    columns = torch.arange(a.width, device=x.device)
    a.ids[:rows] = torch.where(numbers == a.values[:rows, None], columns, a.width).amin(-1)


KERNEL = Kernel(_best, _twin, (Config({"BLOCK": 4096}, 8), Config({"BLOCK": 1024}, 4)))


def best(
    logits: Tensor, ids: Tensor, values: Tensor, finite: Tensor, sizes: Tensor, dim: int, config: Config | None = None
) -> Launch:
    """Write the greatest of each row of logits [S, V] float32: its id int32 [S] and value float32 [S].

    finite int32 [S]: 1 for a row without NaN and +inf. A row of -inf alone has the value -inf.
    """
    arguments: dict[str, Argument] = {
        "logits": logits, "ld": logits.stride(0), "ids": ids, "values": values, "finite": finite, "sizes": sizes,
        "width": logits.shape[1], "DIM": dim,
    }  # fmt: skip
    return Launch(KERNEL, (logits.shape[0],), arguments, config or KERNEL.configs[0])
