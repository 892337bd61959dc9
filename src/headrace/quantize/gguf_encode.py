"""Floats to GGUF's block types: the inverse of `quant.formats.gguf_blocks`, for those types that `headrace quantize`
writes.

The format defines how codes and scales are read, not how they are chosen. Here several scales are tried for each group
of inputs, each is fitted by least squares to the codes that it gives, and the best is taken (the idea of llama.cpp's
K-quants, pull request 1684, here for all blocks at once). Scales that are themselves codes of a super-block are tried
with their neighbours, and the weights' codes are chosen last, by the scales as stored. Knows no files and no models.
Called by `quantize.gguf_writer` and `quantize.mixed`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import cast
from headrace.quant.formats.gguf_blocks import PIECE_WEIGHTS, TYPES
from headrace.quant.threads import on_all_threads

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
F32 = NDArray[np.float32]

SHARES = (0.8, 0.86, 0.91, 0.96, 1.0, 1.06, 1.14)
"""Scales that are tried, as shares of the scale that reaches the group's ends."""
NEIGHBOURS = (0, -1, 1)
MAX_F16 = 65504.0


class Encoder(NamedTuple):
    """write: blocks float32 [n, elements] -> bytes uint8 [n, size]."""

    elements: int
    size: int
    write: Callable[[F32], U8]


def encode(kind: str, weight: F32, name: str = "a weight") -> U8:
    """Rows of floats [rows, in] as rows of blocks, uint8 [rows, in / elements * size].

    On a thread for each core. Raises `CheckpointError` with `name` for weights that are not finite, whose
    scales float16 cannot hold, or whose rows are no whole number of blocks.
    """
    encoder = ENCODERS[kind]
    if weight.shape[1] % encoder.elements:
        raise CheckpointError(
            f"{name} has rows of {weight.shape[1]}, expected a multiple of {encoder.elements}: {kind}"
        )
    largest, bound = float(np.abs(weight).max(initial=0.0)), np.inf if kind in ("F32", "BF16") else MAX_F16
    if not largest < bound:  # also for NaN
        raise CheckpointError(f"{name} has weights up to {largest}, expected below {bound}: {kind}")
    blocks = weight.reshape(-1, encoder.elements)
    raw = np.empty((len(blocks), encoder.size), np.uint8)
    step = PIECE_WEIGHTS // encoder.elements

    def work(first: int) -> None:
        raw[first : first + step] = encoder.write(np.ascontiguousarray(blocks[first : first + step], np.float32))

    on_all_threads(work, len(blocks), step)
    return raw.reshape(len(weight), -1)


def _inverse(scale: F32) -> F32:
    inverse: F32 = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return inverse


def _dot(a: F32, b: F32) -> F32:
    products: F32 = np.einsum("...i,...i->...", a, b)
    return products


def _half(values: F32) -> F32:
    """Return the nearest float16, as float32."""
    return values.astype(np.float16).astype(np.float32)


def _chosen(x: F32, scale: F32, least: F32 | None, low: int, high: int) -> F32:
    """Return the nearest codes, x [..., inputs] and scale [...]; 0 where the scale is 0."""
    moved = x if least is None else x - least[..., None]
    codes: F32 = np.rint(moved * _inverse(scale)[..., None])
    return np.clip(codes, low, high, out=codes)


def _symmetric(x: F32, low: int, high: int) -> F32:
    """Return scales [...] for groups x [..., inputs] whose codes are low ... high, low = -high - 1."""
    index = np.abs(x).argmax(-1)[..., None]
    extreme = np.take_along_axis(x, index, -1)[..., 0]
    best, gain = np.zeros_like(extreme), np.zeros_like(extreme)
    for share, end in product(SHARES, (low, high)):
        codes = _chosen(x, extreme * np.float32(share / end), None, low, high)
        product_, square = _dot(x, codes), _dot(codes, codes)
        fitted = product_ * _inverse(square)
        better = product_ * fitted > gain
        best, gain = np.where(better, fitted, best), np.where(better, product_ * fitted, gain)
    return best


def _affine(x: F32, high: int, below: bool) -> tuple[F32, F32]:
    """Return scales and minima [...] for codes 0 ... high; with `below` no minimum is above 0."""
    num = np.float32(x.shape[-1])
    least, most = x.min(-1), x.max(-1)
    if below:
        least = np.minimum(least, 0)
    total, square = x.sum(-1), _dot(x, x)
    best_scale, best_least = (most - least) / np.float32(high), least
    # If all codes are 0, only the minimum counts.
    best_error = _dot(x - least[..., None], x - least[..., None])
    for share in (*SHARES, None):
        scale = best_scale if share is None else (most - least) * np.float32(share / high)
        codes = _chosen(x, scale, best_least if share is None else least, 0, high)
        of_codes, of_squares, of_products = codes.sum(-1), _dot(codes, codes), _dot(x, codes)
        below_line = _inverse(num * of_squares - of_codes * of_codes)
        scale = (num * of_products - total * of_codes) * below_line
        moved = (total - scale * of_codes) / num
        if below:
            above = moved > 0
            moved = np.where(above, 0, moved)
            scale = np.where(above, of_products * _inverse(of_squares), scale)
        error = square + scale * (scale * of_squares - 2 * of_products + 2 * moved * of_codes)
        error += moved * (num * moved - 2 * total)
        better = (error < best_error) & (scale > 0)
        best_scale, best_least = np.where(better, scale, best_scale), np.where(better, moved, best_least)
        best_error = np.where(better, error, best_error)
    return best_scale.astype(np.float32), best_least.astype(np.float32)


def _refined(
    x: F32, scale: F32, least: F32 | None, high: int, low: int, ends: tuple[int, int]
) -> tuple[F32, F32, F32, F32, F32]:
    """Scales (and minima) [n, groups] as codes of a super-block: d, dmin [n, 1], both's codes, the weights' codes.

    `ends`: the least and greatest code of a scale; minima have codes 0 ... ends[1] and are subtracted.
    """
    places = np.abs(scale).argmax(-1)[:, None]
    # The scale of largest magnitude gets the outermost code.
    outer = _half(np.take_along_axis(scale, places, -1) / np.float32(ends[0] or ends[1]))
    inner = np.zeros_like(outer) if least is None else _half((-least).max(-1, keepdims=True) / np.float32(ends[1]))
    first = np.clip(np.rint(scale * _inverse(outer)), *ends)
    second = np.zeros_like(first) if least is None else np.clip(np.rint(-least * _inverse(inner)), 0, ends[1])
    best = (first, second, np.full_like(first, np.inf))
    for move, other in product(NEIGHBOURS, NEIGHBOURS if least is not None else (0,)):
        trial, moved = np.clip(first + move, *ends), np.clip(second + other, 0, ends[1])
        product_scale, minimum = outer * trial, -(inner * moved)
        rest = x - minimum[..., None] - product_scale[..., None] * _chosen(x, product_scale, minimum, low, high)
        error = _dot(rest, rest)
        better = error < best[2]
        best = (np.where(better, trial, best[0]), np.where(better, moved, best[1]), np.where(better, error, best[2]))
    codes = _chosen(x, outer * best[0], -(inner * best[1]), low, high)
    return outer, inner, best[0], best[1], codes


def _bytes(values: F32) -> U8:
    """float32 [n, k] as the bytes of float16 [n, 2 * k]."""
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def _folded(codes: NDArray[Any], size: int, bits: int) -> U8:
    """Pack codes [n, k] of `bits` bits as [n, k * bits / 8]: the inverse of `gguf_blocks._planes`."""
    fields = codes.astype(np.uint8).reshape(len(codes), -1, 8 // bits, size)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    folded: U8 = np.bitwise_or.reduce(fields << shifts, axis=2).reshape(len(codes), -1)
    return folded


def _legacy(x: F32, bits: int, has_min: bool) -> U8:
    """Blocks of 32 codes of 4 or 5 bits with one scale, and a minimum if `has_min`."""
    half = 0 if has_min else 2 ** (bits - 1)
    if has_min:
        scale, least = (_half(part) for part in _affine(x, 2**bits - 1, False))
        head = _bytes(np.stack((scale, least), 1))
    else:
        scale, least = _half(_symmetric(x, -half, half - 1)), None
        head = _bytes(scale[:, None])
    codes = (_chosen(x, scale, least, -half, 2**bits - 1 - half) + half).astype(np.uint8)
    # The fifth bits of all codes are four bytes, the first code's lowest.
    high = [np.packbits(codes >> 4, axis=1, bitorder="little")] if bits == 5 else []
    return np.concatenate((head, *high, _folded(codes & 15, 16, 4)), axis=1)


def _q8_0(x: F32) -> U8:
    scale = _half(np.abs(x).max(1) / np.float32(127))
    codes = _chosen(x, scale, None, -127, 127).astype(np.int8)
    return np.concatenate((_bytes(scale[:, None]), codes.view(np.uint8)), axis=1)


def _q2_k(x: F32) -> U8:
    groups = x.reshape(-1, 16, 16)
    outer, inner, scale, least, codes = _refined(groups, *_affine(groups, 3, True), 3, 0, (0, 15))
    packed = scale.astype(np.uint8) | least.astype(np.uint8) << 4
    return np.concatenate((packed, _folded(codes.reshape(len(x), -1), 32, 2), _bytes(outer), _bytes(inner)), axis=1)


def _q3_k(x: F32) -> U8:
    groups = x.reshape(-1, 16, 16)
    outer, _, scale, _, codes = _refined(groups, _symmetric(groups, -4, 3), None, 3, -4, (-32, 31))
    bits, packed = (codes.reshape(len(x), -1) + 4).astype(np.uint8), (scale + 32).astype(np.uint8)
    scales = (_folded(packed & 15, 8, 4), _folded(packed >> 4, 4, 2))
    return np.concatenate((_folded(bits >> 2, 32, 1), _folded(bits & 3, 32, 2), *scales, _bytes(outer)), axis=1)


def _six_bits(scale: F32, least: F32) -> U8:
    """Eight scales and eight minima of 6 bits each in 12 bytes."""
    s, m = scale.astype(np.uint8), least.astype(np.uint8)
    first, second = (part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (s, m))
    return np.concatenate((first, second, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4), axis=1)


def _with_minima(x: F32, bits: int) -> U8:
    """Q4_K or Q5_K."""
    groups, high = x.reshape(-1, 8, 32), 2**bits - 1
    outer, inner, scale, least, floats = _refined(groups, *_affine(groups, high, True), high, 0, (0, 63))
    codes = floats.reshape(len(x), -1).astype(np.uint8)
    fifth = [_folded(codes >> 4, 32, 1)] if bits == 5 else []
    head = (_bytes(outer), _bytes(inner), _six_bits(scale, least))
    return np.concatenate((*head, *fifth, _folded(codes & 15, 32, 4)), axis=1)


def _q6_k(x: F32) -> U8:
    groups = x.reshape(-1, 16, 16)
    outer, _, scale, _, codes = _refined(groups, _symmetric(groups, -32, 31), None, 31, -32, (-128, 127))
    bits = (codes.reshape(len(x), -1) + 32).astype(np.uint8)
    scales = scale.astype(np.int8).view(np.uint8)
    return np.concatenate((_folded(bits & 15, 64, 4), _folded(bits >> 4, 32, 2), scales, _bytes(outer)), axis=1)


_BLOCKS: dict[str, Callable[[F32], U8]] = {
    "Q4_0": partial(_legacy, bits=4, has_min=False),
    "Q4_1": partial(_legacy, bits=4, has_min=True),
    "Q5_0": partial(_legacy, bits=5, has_min=False),
    "Q5_1": partial(_legacy, bits=5, has_min=True),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_with_minima, bits=4),
    "Q5_K": partial(_with_minima, bits=5),
    "Q6_K": _q6_k,
}
ENCODERS: dict[str, Encoder] = {
    "F32": Encoder(1, 4, lambda x: np.ascontiguousarray(x, "<f4").view(np.uint8)),
    "F16": Encoder(1, 2, _bytes),
    "BF16": Encoder(1, 2, lambda x: cast(x, "bfloat16").view(np.uint8)),
} | {kind: Encoder(TYPES[kind].elements, TYPES[kind].size, write) for kind, write in _BLOCKS.items()}
"""By the type's name."""


def bits_per_weight(kind: str) -> float:
    encoder = ENCODERS[kind]
    return 8 * encoder.size / encoder.elements
