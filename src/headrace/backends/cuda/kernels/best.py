"""The likeliest token of each row of logits, and whether the row is fit to be sampled from.

Several programs a row. Each finds the greatest logit of its part and the lowest id that has it; both in one integer are
merged by an atomic maximum, so the lowest of equal tokens wins whatever the size of the parts. The last to arrive
writes the results and resets what the row's programs share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch


@triton.jit
def _best(
    logits, ld, tops, arrived, ids, values, finite, sizes, width, DIM: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * ld + column, mask=column < width, other=float("-inf"))
    unfit = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    # NaN is passed over. -0 becomes 0, which ranks like it.
    x = tl.where(x != x, float("-inf"), x) + 0.0
    most = tl.max(x, 0)
    place = tl.min(tl.where(x == most, column, width), 0)
    bits = most.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    # Above 0, since no number that is left has the rank 0.
    tl.atomic_max(tops + row, (rank.to(tl.int64) << 31) | (2147483647 - place).to(tl.int64), sem="relaxed")
    # The lower half counts the parts that arrived, the upper one those that are unfit.
    before = tl.atomic_add(arrived + row, 1 + (unfit << 16), sem="acq_rel")
    if (before & 65535) == tl.num_programs(1) - 1:
        tl.store(arrived + row, 0)
        top = tl.atomic_xchg(tops + row, tl.zeros([], tl.int64), sem="acq_rel")
        rank = (top >> 31).to(tl.uint32)
        bits = tl.where(rank >= 2147483648, rank ^ 2147483648, rank ^ 4294967295).to(tl.int32, bitcast=True)
        tl.store(ids + row, 2147483647 - (top & 2147483647).to(tl.int32))
        tl.store(values + row, bits.to(tl.float32, bitcast=True))
        tl.store(finite + row, ((before >> 16) + unfit == 0).to(tl.int32))


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


class Space(NamedTuple):
    """Memory that the programs of a row share, zero between two runs: the greatest so far int64 [S], and how many
    arrived int32 [S]."""

    tops: Tensor
    arrived: Tensor


def make_space(num_rows: int, device: torch.device | str) -> Space:
    return Space(
        torch.zeros(num_rows, dtype=torch.int64, device=device), torch.zeros(num_rows, dtype=torch.int32, device=device)
    )


def best(
    logits: Tensor,
    space: Space,
    ids: Tensor,
    values: Tensor,
    finite: Tensor,
    sizes: Tensor,
    dim: int,
    config: Config | None = None,
) -> Launch:
    """Write the greatest of each row of logits [S, V] float32: its id int32 [S] and value float32 [S].

    finite int32 [S]: 1 for a row without NaN and +inf. A row of -inf alone has the value -inf.
    """
    config = config or KERNEL.configs[0]
    arguments: dict[str, Argument] = {
        "logits": logits, "ld": logits.stride(0), **space._asdict(), "ids": ids, "values": values, "finite": finite,
        "sizes": sizes, "width": logits.shape[1], "DIM": dim,
    }  # fmt: skip
    return Launch(KERNEL, (logits.shape[0], -(-logits.shape[1] // config.tiles["BLOCK"])), arguments, config)
