"""Round to nearest: weights to codes of 4, 6 or 8 bits while a checkpoint is loaded, without any data to calibrate on.

The affine codes of Jacob et al. 2018 ("Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-
Only Inference"), by group of inputs; the baseline that Frantar et al. 2023 ("GPTQ") call RTN. Scales (and minimums) are
rounded to the float16 in which they are stored before the codes are chosen by them. Symmetric int4 gives the weight of
largest magnitude the code that has no mirror image, -8, as llama.cpp's Q4_0 does, and takes the best of a few narrower
scales by squared error; int6 alike. Codes of a book take the nearest entry: NF4 scales by the largest weight (QLoRA,
section 3), MXFP4 by a power of two (OCP Microscaling Formats, 6.3). Called by the readers of checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight
from headrace.quant.schemes import BOOKS, Scheme
from headrace.quant.threads import on_all_threads

SHRINK = (1.0, 0.9)
"""Scales that are tried for int4, as shares of the one that reaches the group's ends. On Gaussian, Laplace and trained
weights the second lowers the squared error by 4% (groups of 32) to 9% (128); seven more would give 4% at most."""

BLOCK_WEIGHTS = 2**19
"""Weights that a thread works on at once: enough that the calls cost little, and few enough for the caches."""

MAX_F16 = 65504.0
TINY_F16 = 2.0**-24
NORMAL_F16 = 2.0**-14


def quantise(weight: Tensor, scheme: Scheme, name: str = "a weight") -> QWeight:
    """Floats [out, in] as codes of `scheme` (any kind but f), on as many threads as torch is set to.

    int4, int6: |w - dequantised| <= |scale| / 2, but for weights beyond the outermost code. Raises `CheckpointError`
    with `name` for weights that are not finite, or whose scale float16 can not hold.
    """
    num_out, num_in = weight.shape
    group = scheme.group or num_in
    num_groups = -(-num_in // group)
    codes = torch.empty(num_out, num_in, dtype=torch.int8)
    book = torch.tensor(BOOKS[scheme.book], dtype=torch.float32) if scheme.book else None
    scales = torch.empty(num_out, num_groups)
    mins = torch.empty(num_out, num_groups) if scheme.has_min else None
    step = max(1, BLOCK_WEIGHTS // num_in)

    block = _Block(step, num_in, group)

    def work(first: int) -> None:
        with torch.inference_mode():
            rows = slice(first, first + step)
            block_mins = None if mins is None else mins[rows]
            if not block.quantise(weight[rows], scheme, codes[rows], scales[rows], block_mins):
                raise CheckpointError(_why(weight[rows], name))

    on_all_threads(work, num_out, step)
    zeros = torch.full((1, 1), float(scheme.middle)).expand(num_out, num_groups) if scheme.middle else None
    return QWeight(codes, scales, zeros, mins, group, bits=scheme.bits, codebook=book)


class _Block(threading.local):
    """Memory for some rows as floats in groups: `x` [rows, groups, group], and `y` of the same size as scratch.

    Each thread has its own.
    """

    def __init__(self, num_rows: int, num_in: int, group: int) -> None:
        self.num_in = num_in
        shape = (num_rows, -(-num_in // group), group)
        self.x, self.y = torch.empty(shape), torch.empty(shape)

    def quantise(self, rows: Tensor, scheme: Scheme, codes: Tensor, scales: Tensor, mins: Tensor | None) -> bool:
        """Fill codes [rows, in], scales and mins [rows, groups]. Return False if a number is not finite."""
        x, y = self.x[: rows.shape[0]], self.y[: rows.shape[0]]
        flat = x.flatten(1)
        flat[:, : self.num_in] = rows
        # A short last group is filled up with one of its weights, which changes neither end of its range.
        flat[:, self.num_in :] = flat[:, self.num_in - 1 : self.num_in]
        low, high = x.amin(-1), x.amax(-1)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            return False
        if scheme.kind == "i8":
            scale = torch.maximum(high, -low) / 127
            scale = scale if scheme.group == 0 else _f16(scale)
            _codes(x, scale, -127, 127, y)
        elif scheme.book:
            scale = _book_scale(torch.maximum(high, -low), scheme.book)
            _nearest(x, scale, BOOKS[scheme.book], y)
        elif mins is not None:
            most = 2**scheme.bits - 1
            scale, least = _best(x, y, lambda share: _affine(low, high, share, most), 0, most)
            _codes(x.sub_(least.unsqueeze(-1)), scale, 0, most, y)
            mins.copy_(least)
        else:
            middle = scheme.middle
            end = torch.where(-low >= high, low, high) / -middle
            scale, _ = _best(x, y, lambda share: (_f16(end * share), None), -middle, middle - 1)
            _codes(x, scale, -middle, middle - 1, y).add_(middle)
        codes.copy_(y.flatten(1)[:, : self.num_in])
        scales.copy_(scale)
        finite = torch.isfinite(scale).all() if mins is None else (torch.isfinite(scale) & torch.isfinite(mins)).all()
        return bool(finite)


def _best(
    x: Tensor, y: Tensor, candidate: Callable[[float], tuple[Tensor, Tensor | None]], low: int, high: int
) -> tuple[Tensor, Tensor]:
    """(scale, minimum) of each group with the least squared error among the candidates; `y` is scratch."""
    scale, least = candidate(SHRINK[0])
    error = _error(x, y, scale, least, low, high)
    for share in SHRINK[1:]:
        other, other_least = candidate(share)
        other_error = _error(x, y, other, other_least, low, high)
        better = other_error < error
        error = torch.where(better, other_error, error)
        scale = torch.where(better, other, scale)
        if least is not None and other_least is not None:
            least = torch.where(better, other_least, least)
    return scale, scale if least is None else least


def _error(x: Tensor, y: Tensor, scale: Tensor, least: Tensor | None, low: int, high: int) -> Tensor:
    if least is not None:
        x = x - least.unsqueeze(-1)
    _codes(x, scale, low, high, y)
    torch.addcmul(x, y, scale.unsqueeze(-1), value=-1, out=y)
    error: Tensor = torch.linalg.vecdot(y, y)
    return error


def _codes(x: Tensor, scale: Tensor, low: int, high: int, out: Tensor) -> Tensor:
    """round(x / scale) in [low, high], 0 where the scale is 0; x and out [rows, groups, group]."""
    divisor = torch.where(scale == 0, torch.inf, scale).unsqueeze(-1)
    return torch.div(x, divisor, out=out).round_().clamp_(low, high)


def _book_scale(largest: Tensor, book: str) -> Tensor:
    """float16 scales under which the groups' largest magnitudes reach the book's ends."""
    if book != "e2m1":
        return _f16(largest / max(BOOKS[book]))
    # The book has twice E2M1's numbers, whose largest power of two is 4. Below 2**-24 float16 has nothing.
    exponent = torch.floor(torch.log2(largest.clamp_min(TINY_F16))) - 3
    return torch.where(largest == 0, 0.0, torch.exp2(exponent.clamp_min(-24.0)))


def _nearest(x: Tensor, scale: Tensor, book: tuple[int, ...], out: Tensor) -> None:
    """The code of the entry nearest to x / scale; x and out [rows, groups, group]."""
    entries, order = torch.tensor(book, dtype=torch.float32).sort(stable=True)
    divisor = torch.where(scale == 0, torch.inf, scale).unsqueeze(-1)
    places = torch.bucketize(torch.div(x, divisor, out=out), (entries[1:] + entries[:-1]) / 2)
    torch.index_select(order.float(), 0, places.flatten(), out=out.view(-1))


def _affine(low: Tensor, high: Tensor, share: float, most: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum for codes 0 ... most from end to end, or over the middle `share` of the range."""
    margin = (high - low) * ((1 - share) / 2)
    # Rounded down: a minimum above the weights would clip them by more than a code where their range is narrow.
    least = _f16_below(low + margin)
    return _f16((high - margin - least) / most), least


def _f16(scale: Tensor) -> Tensor:
    """The nearest float16, as float32; away from zero where float16 has few bits left, so that no weight is cut off."""
    small = scale.abs() < NORMAL_F16
    coarse = torch.copysign(torch.ceil(scale.abs() / TINY_F16) * TINY_F16, scale)
    return torch.where(small, coarse, scale.half().float())


def _f16_below(x: Tensor) -> Tensor:
    """The greatest float16 that is not greater than x, as float32; -inf if there is none."""
    near = x.half()
    bits = near.view(torch.int16)
    below = torch.where(near == 0, -32767, torch.where(near > 0, bits - 1, bits + 1)).to(torch.int16)
    return torch.where(near.float() > x, below.view(torch.float16), near).float()


def _why(rows: Tensor, name: str) -> str:
    rows = rows.float()
    if not bool(torch.isfinite(rows).all()):
        return f"{name} has a weight that is not finite; it can not be quantised"
    return (
        f"{name} has weights as large as {rows.abs().max().item():.3g}, and their scale is beyond float16 "
        f"({MAX_F16:g}); int8-channel keeps scales in float32"
    )
