"""Chooses the kernel that can take a checkpoint's codes without quantising again, and converts them to its form.

int2 and int3 kernels compute (code - 2 or 4) * scale, or (code - zero) * scale with whole zeros; int4 and int6 kernels
(code - 8 or 32) * scale, code * scale + minimum, or level[code] * scale with codes of 4 bits; int8 kernels code *
scale, or code * scale + minimum, with codes -128 ... 127. Scales are float16 for each group of inputs, or (int8 without
minimums) one float32 for each output. 8-bit floats (E4M3) keep their float32 scales, for backends that declare them.
Codes of other lengths, other zero points and larger groups are converted to these forms where that loses nothing;
scales, minimums and tables that the kernels cannot hold are rounded, by `Fit.rounding` at most. All other weights have
no kernel and are dequantised. Knows no checkpoints and no backends. Called by `checkpoint.stacks`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import half, repeated, type_name
from headrace.quant.base import MOST_ZERO, QWeight, SplitWeight, widened
from headrace.quant.schemes import BITS, E4M3, GROUPS, LEVELS, SCHEMES, Kind, Scheme, kernel_name

CHANNEL_GROUP = 128
"""Group of int4 weights that have one scale for each output: activations are quantised in groups of it."""

MOST_ROUNDING = 2.0**-8
"""Of a scale, as a share of it: bfloat16's rounding. Beyond it a matrix is dequantised."""
BOOK_ROUNDING = 1e-6
"""The rounding of the kernels' levels to float32: of a table's entry, as a share of its largest."""
SMALL = 2.0**-12
"""The rounding of scales below this share of the matrix's largest is measured by it: such groups are almost zero."""


class Fit(NamedTuple):
    """scheme: of the kernel, or None for none. why: the reason for none. rounding: the largest change of a weight, in
    steps of its code. columns: inputs whose weights have 16 bits in addition to the kernel's codes. permutation: as
    `QWeight` has it."""

    scheme: Scheme | None
    why: str = ""
    rounding: float = 0.0
    columns: NDArray[np.int64] | None = None
    permutation: NDArray[np.int64] | None = None

    @property
    def form(self) -> Hashable:
        """Equal for weights that can be parts of one matrix without a change of either."""
        columns, order = self.columns, self.permutation
        return self.scheme, None if columns is None else columns.tobytes(), None if order is None else order.tobytes()


def fit_of(weights: Sequence[QWeight], schemes: Collection[Scheme] = SCHEMES, *, permutes: bool = True) -> Fit:
    """How weights that are stacked to one matrix run: on one kernel out of `schemes`, or on none. permutes: each matrix
    may have its inputs in another order (act-order)."""
    is_split = any(isinstance(weight, SplitWeight) for weight in weights)
    orders = [weight.permutation for weight in weights]
    if any(order is not None for order in orders):
        if not permutes:
            return Fit(None, "its groups are of inputs that do not lie side by side (act-order)")
        if len({None if order is None else order.tobytes() for order in orders}) > 1:
            return Fit(None, "its parts have their inputs in different orders (act-order)")
    fit = _fit_split(weights) if is_split else _fit_stacked(weights, frozenset(scheme.kind for scheme in schemes))
    if fit.scheme is None:
        return fit
    if fit.scheme not in schemes:
        return Fit(None, f"the backend has no {kernel_name(fit.scheme)} kernel")
    return fit._replace(permutation=orders[0])


def _fit_stacked(weights: Sequence[QWeight], kinds: frozenset[Kind]) -> Fit:
    fits = [_fit(weight, kinds) for weight in weights]
    schemes = [fit.scheme for fit in fits if fit.scheme is not None]
    if len(schemes) < len(fits):
        return next(fit for fit in fits if fit.scheme is None)
    if len({(scheme.kind, scheme.group == 0, scheme.book) for scheme in schemes}) > 1:
        return Fit(None, "its parts have codes of different kinds")
    has_min = any(scheme.has_min for scheme in schemes)
    rounding = max(fit.rounding for fit in fits)
    if has_min:
        rounding = max(rounding, *(_min_rounding(weight) for weight in weights))
    group, has_zero = min(scheme.group for scheme in schemes), any(scheme.has_zero for scheme in schemes)
    return Fit(schemes[0]._replace(group=group, has_min=has_min, has_zero=has_zero), "", rounding)


def _fit_split(weights: Sequence[QWeight]) -> Fit:
    """LLM.int8(): the codes are the int8 kernel's, and all parts must have the same outliers."""
    columns = [weight.columns for weight in weights if isinstance(weight, SplitWeight) and weight.columns is not None]
    if len(columns) < len(weights) or not all(np.array_equal(columns[0], other) for other in columns[1:]):
        return Fit(None, "its parts have outliers of their own, whose weights have 16 bits")
    if any(weight.scales is None or weight.scales.shape[1] > 1 or weight.bits != 8 for weight in weights):
        return Fit(None, "some of its inputs are outliers beside codes in groups")
    return Fit(Scheme("i8"), "with outliers in 16 bits", 0.0, columns[0])


def fitted(weight: QWeight, scheme: Scheme) -> QWeight:
    """The same weights as codes of `scheme`, the result of `fit_of` for them; for some rows or all."""
    if weight.scales is None:
        raise ValueError("plain weights have no codes to be fitted")
    if isinstance(weight, SplitWeight):
        return weight
    num_in, codes, order = weight.shape[1], weight.codes, weight.permutation
    if scheme.book:
        scales = half(_regrouped(_book_scales(weight, scheme.book), weight, scheme.group))
        book = np.array(LEVELS[scheme.book], np.float32)
        return QWeight(codes, scales, group=scheme.group, bits=4, permutation=order, codebook=book)
    scales = weight.scales if scheme.group == 0 else _regrouped(weight.scales, weight, scheme.group)
    group = scheme.group or num_in
    if scheme.kind == "f8":
        return QWeight(codes, scales, group=group, bits=8, permutation=order)
    scales = scales if scheme.group == 0 else half(scales)
    if scheme.has_min:
        mins = half(_regrouped(_minimums(weight, weight.scales), weight, group))
        codes = (codes ^ 128).view(np.int8) if _middle_of_bytes(weight) else codes
        return QWeight(codes, scales, mins=mins, group=group, bits=scheme.bits, permutation=order)
    if scheme.has_zero and weight.zeros is not None:
        zeros = _regrouped(weight.zeros, weight, group)
        return QWeight(codes, scales, zeros, group=group, bits=scheme.bits, permutation=order)
    middle = scheme.middle
    if weight.zeros is not None and not (weight.zeros == middle).all():
        shifts = middle - widened(weight.zeros, weight.group, num_in).astype(np.int16)
        codes = (codes.astype(np.int16) + shifts).astype(np.uint8 if middle else np.int8)
    elif weight.zeros is None and middle:
        codes = codes + middle
    zeros = np.broadcast_to(np.float32(middle), scales.shape) if middle else None
    return QWeight(codes, scales, zeros, group=group, bits=scheme.bits, permutation=order)


def _fit(weight: QWeight, kinds: frozenset[Kind]) -> Fit:
    why = _why_not(weight, "f8" in kinds)
    if why or weight.scales is None:
        return Fit(None, why)
    channel = weight.scales.shape[1] == 1
    if _is_float(weight):
        return Fit(Scheme("f8", 0 if channel else next(n for n in GROUPS if weight.group % n == 0), dtype=E4M3))
    group = CHANNEL_GROUP if channel else next(size for size in GROUPS if weight.group % size == 0)
    if weight.codebook is not None:
        return _fit_book(weight, group)
    kind: Kind = "i4" if weight.bits <= 4 else "i6" if weight.bits <= 6 else "i8"
    moved = kind == "i8" and _is_moved(weight)
    if kind == "i8" and channel and not moved:
        return Fit(Scheme("i8"))
    rounding = _rounding(weight.scales)
    if rounding > MOST_ROUNDING:
        return Fit(None, "float16 does not hold its scales")
    change = rounding * 2.0**weight.bits  # of the outermost code
    scheme = Scheme(kind, group)
    if kind == "i8" and not moved:
        return Fit(scheme, "", change)
    small = next((kind for kind, bits in BITS.items() if bits == weight.bits and bits < 4), None)
    if small in kinds and small is not None and _has_zeros(weight) and (small == "i2" or group > 8):
        is_centred = bool((weight.zeros == 2 ** (weight.bits - 1)).all())
        return Fit(Scheme(small, group, has_zero=not is_centred), "", change)
    is_whole = weight.mins is None and (weight.zeros is None or _is_whole(weight.zeros))
    is_centred = weight.zeros is not None and (weight.zeros == scheme.middle).all()
    if not moved and is_whole and (weight.bits < scheme.bits or is_centred):
        return Fit(scheme, "", change)
    least = _min_rounding(weight)
    if least > 1.0:
        return Fit(None, "float16 does not hold its minimums")
    return Fit(Scheme(kind, group, True), "", change + least)


def _fit_book(weight: QWeight, group: int) -> Fit:
    """Find the kernel whose book is the weight's table of 16 numbers, up to a factor."""
    if weight.codebook is None or weight.scales is None or weight.bits != 4 or len(weight.codebook) != 16:
        return Fit(None, f"codes of {weight.bits} bits from a table have no kernel")
    entries = weight.codebook.astype(np.float64)
    table = entries / np.abs(entries).max()
    for name, levels in LEVELS.items():
        book = np.array(levels, np.float64) / max(abs(level) for level in levels)
        change = float(np.abs(table - book).max())
        rounding = _rounding(_book_scales(weight, name))
        if change <= BOOK_ROUNDING and rounding <= MOST_ROUNDING and weight.zeros is None and weight.mins is None:
            steps = np.diff(np.sort(table))
            return Fit(Scheme("i4", group, book=name), "", (change + rounding) / float(steps[steps > 0].min()))
    return Fit(None, "no kernel has its table of codes")


def _book_scales(weight: QWeight, book: str) -> Any:
    """Scales [out, groups] for the kernel's book."""
    if weight.scales is None or weight.codebook is None:
        raise ValueError("a weight without a table")
    return weight.scales * (float(np.abs(weight.codebook).max()) / max(abs(level) for level in LEVELS[book]))


def _why_not(weight: QWeight, takes_f8: bool) -> str:
    """Why no kernel has the form of `weight`, or "". takes_f8: there are kernels for 8-bit floats."""
    if weight.scales is None:
        return "it is not quantised"
    if _is_float(weight):
        return "" if takes_f8 and _is_f8(weight) else "8-bit floats have no kernel"
    if weight.scales.shape[1] > 1 and all(weight.group % size for size in GROUPS):
        return f"groups of {weight.group} have no kernel"
    if weight.codebook is not None:
        return ""
    if weight.bits > 6:
        return _why_not_i8(weight)
    return "" if type_name(weight.codes) == "uint8" else f"signed codes of {weight.bits} bits have no kernel"


def _is_f8(weight: QWeight) -> bool:
    """Whether the codes are E4M3 with nothing but scales, one for each output or in groups that kernels may have."""
    others = (weight.zeros, weight.mins, weight.codebook)
    if weight.scales is None or type_name(weight.codes) != E4M3 or any(part is not None for part in others):
        return False
    return weight.scales.shape[1] == 1 or any(weight.group % size == 0 for size in GROUPS)


def _why_not_i8(weight: QWeight) -> str:
    if weight.bits > 8 or type_name(weight.codes) not in ("int8", "uint8"):
        return f"codes of {weight.bits} bits, {type_name(weight.codes)}, have no kernel"
    return ""


def _is_moved(weight: QWeight) -> bool:
    """Whether codes of 7 or 8 bits need minimums in an int8 kernel."""
    zero = _middle_of_bytes(weight)
    if weight.mins is not None or weight.zeros is None:
        return weight.mins is not None or zero > 0
    if weight.bits < 8:  # there is room for whole zero points
        return type_name(weight.codes) != "uint8" or not _is_whole(weight.zeros)
    return not (weight.zeros == zero).all()


def _middle_of_bytes(weight: QWeight) -> int:
    """The number that is subtracted from codes of 8 bits for a kernel of signed ones."""
    return 128 if weight.bits == 8 and type_name(weight.codes) == "uint8" else 0


def _is_float(weight: QWeight) -> bool:
    return type_name(weight.codes).startswith("float")


def _is_whole(zeros: NDArray[Any]) -> bool:
    return bool(((zeros == np.rint(zeros)) & (zeros >= 0) & (zeros < 256)).all())


def _has_zeros(weight: QWeight) -> bool:
    """Whether the weight has nothing but scales, and zeros that fit 4 bits."""
    if weight.zeros is None or weight.mins is not None:
        return False
    return _is_whole(weight.zeros) and bool((weight.zeros <= MOST_ZERO).all())


def _minimums(weight: QWeight, scales: NDArray[np.float32]) -> Any:
    """The weights that the kernel's code 0 stands for: [out, groups]."""
    least = np.zeros_like(scales) if weight.mins is None else weight.mins
    zeros = -_middle_of_bytes(weight) if weight.zeros is None else weight.zeros - _middle_of_bytes(weight)
    return least - zeros * half(scales)


def _min_rounding(weight: QWeight) -> float:
    """The largest change of a minimum by rounding it to float16, in steps of codes; inf beyond float16."""
    if weight.scales is None:
        return 0.0
    least = _minimums(weight, weight.scales)
    return _largest_share(np.abs(half(least) - least), weight.scales)


def _rounding(scales: NDArray[np.float32]) -> float:
    """The largest relative change of a scale by rounding it to float16; inf beyond float16."""
    return _largest_share(np.abs(half(scales) - scales), scales)


def _largest_share(changes: NDArray[np.float32], scales: NDArray[np.float32]) -> float:
    sizes = np.abs(scales)
    sizes = np.maximum(sizes, sizes.max() * SMALL)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(changes == 0, 0.0, changes / sizes)
    return float(np.nan_to_num(shares, nan=np.inf, posinf=np.inf).max())


def _regrouped(part: NDArray[Any], weight: QWeight, group: int) -> Any:
    """[out, groups of weight.group] as [out, groups of `group`]."""
    num_groups = -(-weight.shape[1] // group)
    if part.shape[1] == 1:
        return repeated(part, num_groups)
    return widened(part, weight.group // group, num_groups)
