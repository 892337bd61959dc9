"""The ends of a step that draws on the device: tokens that the last step drew become inputs, and all that the host
receives of a step comes to lie in one piece."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.kernels.settle import LEFT
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.graph import LOGITS, ROWS


@triton.jit
def _carry(places, tokens, token_ids, sizes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + row, mask=row < tl.load(sizes + ROWS), other=-1)
    tl.store(token_ids + row, tl.load(tokens + place, mask=place >= 0, other=0), mask=place >= 0)


def _carry_twin(a: Arguments) -> None:
    places = a.places[: int(a.sizes[a.ROWS])]
    rows = (places >= 0).nonzero()[:, 0]
    a.token_ids[rows] = a.tokens[places[rows].long()]


CARRY = Kernel(_carry, _carry_twin, (Config({"BLOCK": 256}),))


def carry(places: Tensor, tokens: Tensor, token_ids: Tensor, sizes: Tensor, most: int) -> Launch:
    """Write tokens[places[r]] into token_ids[r], for the rows r of which that place is not -1. All are int32.

    most: rows of the bucket.
    """
    arguments: dict[str, Argument] = {
        "places": places, "tokens": tokens, "token_ids": token_ids, "sizes": sizes, "ROWS": ROWS
    }  # fmt: skip
    return Launch(CARRY, (-(-most // CARRY.configs[0].tiles["BLOCK"]),), arguments, CARRY.configs[0])


@triton.jit
def _report(
    tokens, margins, wholes, best, finite, values, finite_rows, out, margin, sizes, width, LEFT: tl.constexpr,
    ROWS: tl.constexpr, LOGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_rows, num = tl.load(sizes + ROWS), tl.load(sizes + LOGITS)
    inside = row < num
    is_left = tl.load(wholes + 4 * row + 3, mask=inside, other=0) == LEFT
    likeliest, token = tl.load(best + row, mask=inside, other=0), tl.load(tokens + row, mask=inside, other=0)
    is_sure = is_left | (tl.load(margins + row, mask=inside, other=0.0) > tl.load(margin))
    is_fit = tl.load(finite + row, mask=inside, other=0) != 0
    is_fit &= tl.load(values + row, mask=inside, other=0.0) > float("-inf")
    tl.store(out + row, tl.minimum(tl.maximum(tl.where(is_left, likeliest, token), 0), width - 1), mask=inside)
    tl.store(out + num + row, is_fit.to(tl.int32), mask=inside)
    tl.store(out + 2 * num + row, is_sure.to(tl.int32), mask=inside)
    inside = row < num_rows
    tl.store(out + 3 * num + row, tl.load(finite_rows + row, mask=inside, other=0), mask=inside)


def _report_twin(a: Arguments) -> None:
    num_rows, num = int(a.sizes[a.ROWS]), int(a.sizes[a.LOGITS])
    is_left = a.wholes[:num, 3] == a.LEFT
    ids = torch.where(is_left, a.best[:num], a.tokens[:num]).clamp(0, a.width - 1)
    fit = (a.finite[:num] != 0) & (a.values[:num] > -torch.inf)
    sure = is_left | (a.margins[:num] > a.margin)
    a.out[: 3 * num + num_rows] = torch.cat((ids, fit.int(), sure.int(), a.finite_rows[:num_rows]))


REPORT = Kernel(_report, _report_twin, (Config({"BLOCK": 256}),))


def report(
    tokens: tuple[Tensor, Tensor],
    wholes: Tensor,
    best: tuple[Tensor, Tensor, Tensor],
    finite_rows: Tensor,
    out: Tensor,
    margin: Tensor,
    sizes: Tensor,
    width: int,
) -> Launch:
    """Write of n rows of logits and r rows of hidden states into out int32: n tokens, n flags of rows of logits that
    are fit to be sampled from, n flags of tokens that are certain, r flags of finite rows.

    tokens: tokens int32 [S] and margins float64 [S] of `choose`; certain are those whose margin exceeds `margin`
    float64 [1]. Rows that were left out take the likeliest token, and are certain.
    wholes: as `choose.pack` writes it. best: ids, finite, values of `best`. finite_rows int32 [R].
    """
    ids, finite, values = best
    arguments: dict[str, Argument] = {
        "tokens": tokens[0], "margins": tokens[1], "wholes": wholes, "best": ids, "finite": finite, "values": values,
        "finite_rows": finite_rows, "out": out, "margin": margin, "sizes": sizes, "width": width, "LEFT": LEFT,
        "ROWS": ROWS, "LOGITS": LOGITS,
    }  # fmt: skip
    most = max(len(ids), len(finite_rows))
    return Launch(REPORT, (-(-most // REPORT.configs[0].tiles["BLOCK"]),), arguments, REPORT.configs[0])
