"""Round to nearest: weights to codes of 4, 6 or 8 bits or to 8-bit floats while a checkpoint is loaded, without any
data to calibrate on.

The affine codes of Jacob et al. 2018 ("Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-
Only Inference"), by group of inputs; the baseline that Frantar et al. 2023 ("GPTQ") call RTN. Scales (and minimums) are
rounded to the float16 in which they are stored before the codes are chosen by them. Symmetric int4 gives the weight of
largest magnitude the code that has no mirror image, -8, as llama.cpp's Q4_0 does, and takes the best of a few narrower
scales by squared error; int6 alike. Codes of a book take the nearest entry: NF4 scales by the largest weight (QLoRA,
section 3), MXFP4 by a power of two (OCP Microscaling Formats, 6.3). IQ4_NL, which plain int4 means, fits the scale by
least squares to the codes that either end of its levels gives, and takes the better; large weights count more, as in
llama.cpp's K-quants (pull request 1684). E4M3's scale brings the largest weight to its
largest number (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Called by the readers of checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import E4M3, floats, half
from headrace.quant.base import QWeight
from headrace.quant.schemes import LEVELS, Scheme
from headrace.quant.threads import on_all_threads

F32 = NDArray[np.float32]

SHRINK = (1.0, 0.9)
"""Scales that are tried for int4, as shares of the scale that reaches the group's ends. On Gaussian, Laplace and
trained weights the second lowers the squared error by 4% (groups of 32) to 9% (128); seven more would give 4% at
most."""

BLOCK_WEIGHTS = 2**19
"""Weights that a thread works on at once: enough that the calls cost little, and few enough for the caches."""

LONG = 512
"""Inputs of a group from which on numpy is as fast along the group as along other axes."""

IQ4_NL = LEVELS["iq4_nl"]
NEAREST_IQ4_NL = np.array(
    [min(IQ4_NL, key=lambda level: abs(level - number)) for number in range(int(IQ4_NL[0]), int(IQ4_NL[-1]) + 1)],
    np.float32,
)
"""The level nearest to each whole number from the first level to the last."""

MAX_E4M3 = 448.0
NORMAL_E4M3 = 2.0**-6
MAX_F16 = 65504.0
TINY_F16 = 2.0**-24
NORMAL_F16 = 2.0**-14


def quantise(weight: NDArray[Any], scheme: Scheme, name: str = "a weight") -> QWeight:
    """Floats [out, in] as codes of `scheme` (any kind but f), on a thread for each core.

    int4, int6: |w - dequantised| <= |scale| / 2, but for weights beyond the outermost code. Raises `CheckpointError`
    with `name` for weights that are not finite, or whose scale float16 cannot hold.
    """
    num_out, num_in = weight.shape
    group = scheme.group or num_in
    num_groups = -(-num_in // group)
    codes = np.empty((num_out, num_in), np.int8)
    book = np.array(LEVELS[scheme.book], np.float32) if scheme.book else None
    scales = np.empty((num_out, num_groups), np.float32)
    mins = np.empty_like(scales) if scheme.has_min else None
    step = max(1, BLOCK_WEIGHTS // num_in)
    block = _Block(step, num_in, group)

    def work(first: int) -> None:
        rows = slice(first, first + step)
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = block.quantise(
                weight[rows], scheme, codes[rows], scales[rows], None if mins is None else mins[rows]
            )
        if not is_finite:
            raise CheckpointError(_why(weight[rows], name))

    on_all_threads(work, num_out, step)
    if scheme.kind == "f8":
        return QWeight(codes.view(E4M3), scales, group=group, bits=8)
    zeros = np.broadcast_to(np.float32(scheme.middle), scales.shape) if scheme.middle else None
    return QWeight(codes, scales, zeros, mins, group, bits=scheme.bits, codebook=book)


class _Block(threading.local):
    """Memory for some rows as floats in groups: `x` [group, rows * groups], and `y` and `z` of that shape as scratch.

    A short group is a column, so that numpy works on many groups at once. Each thread has its own.
    """

    def __init__(self, num_rows: int, num_in: int, group: int) -> None:
        self.group = group
        self.wide = np.empty((num_rows, -(-num_in // group) * group), np.float32)
        self.x = self.wide if group >= LONG else np.empty_like(self.wide)
        self.y, self.z = np.empty_like(self.wide), np.empty_like(self.wide)

    def quantise(
        self, rows: NDArray[Any], scheme: Scheme, codes: NDArray[np.int8], scales: F32, mins: F32 | None
    ) -> bool:
        """Fill codes [rows, in], scales and mins [rows, groups]. Return False if a number is not finite."""
        num_rows, num_in = rows.shape
        wide = self.wide[:num_rows]
        wide[:, :num_in] = floats(rows)
        # A short last group is filled up with one of its weights, which changes neither end of its range.
        wide[:, num_in:] = wide[:, num_in - 1 : num_in]
        x, y = (self._grouped(memory[:num_rows]) for memory in (self.x, self.y))
        if self.group < LONG:
            x[:] = wide.reshape(-1, self.group).T
        low, high = x.min(0), x.max(0)
        if not (np.isfinite(low) & np.isfinite(high)).all():
            return False
        if scheme.kind == "i8":
            scale: F32 = np.maximum(high, -low) / np.float32(127)
            scale = scale if scheme.group == 0 else _f16(scale)
            _codes(x, scale, -127, 127, y)
        elif scheme.kind == "f8":
            scale = np.maximum(high, -low) / np.float32(MAX_E4M3)
            _e4m3(x, scale, y)
        elif scheme.book:
            if scheme.book == "iq4_nl":
                scale = _fitted_scale(x, np.where(-low >= high, low, high), y, self._grouped(self.z[:num_rows]))
            else:
                scale = _book_scale(np.maximum(high, -low), scheme.book)
            _nearest(x, scale, LEVELS[scheme.book], y)
        elif mins is not None:
            most = 2**scheme.bits - 1
            scale, least = _best(x, y, lambda share: _affine(low, high, share, most), 0, most)
            _codes(np.subtract(x, least, out=x), scale, 0, most, y)
            mins[:] = least.reshape(num_rows, -1)
        else:
            middle = scheme.middle
            end = np.where(-low >= high, low, high) / -middle
            scale, _ = _best(x, y, lambda share: (_f16(end * share), None), -middle, middle - 1)
            _codes(x, scale, -middle, middle - 1, y)
            y += middle
        codes[:] = y.astype(np.int8).T.reshape(num_rows, -1)[:, :num_in]
        scales[:] = scale.reshape(num_rows, -1)
        return bool(np.isfinite(scale).all() and (mins is None or np.isfinite(mins).all()))

    def _grouped(self, rows: F32) -> F32:
        """The memory of some rows as [group, groups]; a long group lies there in one piece."""
        return rows.reshape(-1, self.group).T if self.group >= LONG else rows.reshape(self.group, -1)


def _best(x: F32, y: F32, candidate: Callable[[float], tuple[F32, F32 | None]], low: int, high: int) -> tuple[F32, F32]:
    """(scale, minimum) of each group with the least squared error among the candidates; `y` is scratch."""
    scale, least = candidate(SHRINK[0])
    error = _error(x, y, scale, least, low, high)
    for share in SHRINK[1:]:
        other, other_least = candidate(share)
        other_error = _error(x, y, other, other_least, low, high)
        better = other_error < error
        error = np.where(better, other_error, error)
        scale = np.where(better, other, scale)
        if least is not None and other_least is not None:
            least = np.where(better, other_least, least)
    return scale, scale if least is None else least


def _error(x: F32, y: F32, scale: F32, least: F32 | None, low: int, high: int) -> F32:
    """Squared error of each group, summed in float32 from the group's first weight to its last."""
    if least is not None:
        x = x - least
    _codes(x, scale, low, high, y)
    y *= scale
    np.subtract(x, y, out=y)
    y *= y
    return _total(y)


def _codes(x: F32, scale: F32, low: int, high: int, out: F32) -> None:
    """round(x / scale) in [low, high], 0 where the scale is 0; x and out [group, groups]."""
    np.divide(x, np.where(scale == 0, np.float32(np.inf), scale), out=out)
    np.rint(out, out=out)
    np.clip(out, low, high, out=out)


def _e4m3(x: F32, scale: F32, out: F32) -> None:
    """The bits of the E4M3 nearest to x / scale, ties to even, as -128 to 127; x and out [group, groups]."""
    np.divide(x, np.where(scale == 0, np.float32(np.inf), scale), out=out)
    np.clip(out, -MAX_E4M3, MAX_E4M3, out=out)  # the division may round beyond it
    sizes = np.abs(out)
    # Float32 has 20 more bits of fraction and an exponent's bias of 127, E4M3 7. Below the least normal number, E4M3 is
    # a whole number of 2**-9, and 8 of them are that least number.
    words = sizes.view(np.int32)
    normal = (words + (0x7FFFF + (words >> 20 & 1)) >> 20) - (127 - 7 << 3)
    codes = np.where(sizes < NORMAL_E4M3, np.rint(sizes * 512).astype(np.int32), normal)
    out[:] = np.where(np.signbit(out), codes - 128, codes)


def _book_scale(largest: F32, book: str) -> F32:
    """float16 scales under which the groups' largest magnitudes reach the book's ends."""
    if book != "e2m1":
        return _f16(largest / np.float32(max(LEVELS[book])))
    # The book has twice E2M1's numbers, whose largest power of two is 4. Below 2**-24 float16 has nothing.
    exponent = np.floor(np.log2(np.maximum(largest, np.float32(TINY_F16)))) - 3
    return np.where(largest == 0, np.float32(0), np.exp2(np.maximum(exponent, np.float32(-24))))


def _fitted_scale(x: F32, largest: F32, level: F32, weighted: F32) -> F32:
    """float16 scales for IQ4_NL with the least error; a weight's counts |x| + the root of its group's mean square.

    largest: of each group, the weight of the greatest magnitude. level, weighted: scratch like x [group, groups].
    """
    np.multiply(x, x, out=level)
    mean = np.sqrt(_total(level) / np.float32(len(x)))
    best = gain = np.zeros_like(largest)
    for end in (IQ4_NL[0], IQ4_NL[-1]):
        scale = largest / np.float32(end)
        np.divide(x, np.where(scale == 0, np.float32(np.inf), scale), out=level)
        np.rint(level, out=level)
        np.clip(level, IQ4_NL[0], IQ4_NL[-1], out=level)
        level -= IQ4_NL[0]
        np.take(NEAREST_IQ4_NL, level.astype(np.uint8), out=level, mode="clip")
        np.abs(x, out=weighted)
        weighted += mean
        weighted *= level
        level *= weighted
        square = _total(level)
        weighted *= x
        product = _total(weighted)
        fitted = np.divide(product, square, out=np.zeros_like(product), where=square != 0)
        better = ~(product * fitted <= gain)  # also for numbers that are none, which the caller refuses
        best, gain = np.where(better, fitted, best), np.where(better, product * fitted, gain)
    return _f16(best)


def _total(rows: F32) -> F32:
    """The sum of each column in float32, from the first row to the last."""
    total: F32 = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def _nearest(x: F32, scale: F32, book: tuple[float, ...], out: F32) -> None:
    """The code of the entry nearest to x / scale; x and out [group, groups]."""
    numbers = np.array(book, np.float32)
    order = np.argsort(numbers, kind="stable")
    entries = numbers[order]
    np.divide(x, np.where(scale == 0, np.float32(np.inf), scale), out=out)
    places = np.zeros(out.shape, np.uint8)
    for boundary in (entries[1:] + entries[:-1]) / 2:
        places += out > boundary
    out[:] = order[places]


def _affine(low: F32, high: F32, share: float, most: int) -> tuple[F32, F32]:
    """Scale and minimum for codes 0 ... most from end to end, or over the middle `share` of the range."""
    margin = (high - low) * ((1 - share) / 2)
    # Rounded down: a minimum above the weights would clip them by more than a code where their range is narrow.
    least = _f16_below(low + margin)
    return _f16((high - margin - least) / np.float32(most)), least


def _f16(scale: F32) -> F32:
    """The nearest float16, as float32; away from zero where float16 has few bits left, so that no weight is cut off."""
    size = np.abs(scale)
    coarse = np.copysign(np.ceil(size / TINY_F16) * TINY_F16, scale)
    return np.where(size < NORMAL_F16, coarse, half(scale))


def _f16_below(x: F32) -> F32:
    """The greatest float16 that is not greater than x, as float32; -inf if there is none."""
    near = x.astype(np.float16)
    bits = near.view(np.int16)
    below = np.where(near == 0, np.int16(-32767), np.where(near > 0, bits - 1, bits + 1)).astype(np.int16)
    return np.where(near.astype(np.float32) > x, below.view(np.float16), near).astype(np.float32)


def _why(rows: NDArray[Any], name: str) -> str:
    rows = floats(rows)
    if not np.isfinite(rows).all():
        return f"{name} has a weight that is not finite; it can not be quantised"
    return (
        f"{name} has weights as large as {np.abs(rows).max():.3g}, and their scale is beyond float16 "
        f"({MAX_F16:g}); int8-channel keeps scales in float32"
    )
