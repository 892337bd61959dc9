"""GGUF's block types as codes, scales and minima: `decode` reads rows of raw blocks into a `QWeight`.

A weight of any block type is code * scale + minimum, with integer codes, or numbers of a table's entries, and a scale
for 16 to 256 inputs; `TYPES` describes each. Computed in float32 in that order this gives ggml's numbers to the bit,
because the products are exact. `native` converts such a weight to a form that kernels have. Layouts: the GGUF
specification and ggml's block structs; the methods are llama.cpp's (K-quants: pull request 1684; IQ: 4773, 4856, 5453,
5590, 5999), ternary types 8151, MXFP4 the OCP Microscaling specification 1.0. Knows no files and no models; called by
`checkpoint.gguf_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant import rtn
from headrace.quant.arrays import half, repeated
from headrace.quant.base import QWeight
from headrace.quant.formats.gguf_grids import even_signs, grid, signs
from headrace.quant.schemes import K_BLOCK, K_GROUP, K_TYPES, LEVELS, SCHEMES, Scheme
from headrace.quant.threads import on_all_threads

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]
"""Of n blocks: codes [n, elements], scales [n, groups] and, or None, minima [n, groups]."""

PIECE_WEIGHTS = 2**17
"""Weights that are decoded at once, so that intermediate results stay in the caches."""


class BlockType(NamedTuple):
    """elements and size in bytes of a block; inputs that share a scale; the least and the greatest code.

    book: the table (`schemes.LEVELS`) from which codes choose; low and high are its entries' then.
    """

    elements: int
    size: int
    group: int
    low: int
    high: int
    has_min: bool
    read: Callable[[U8], Parts]
    book: str = ""


def _f16(raw: U8) -> F32:
    """Little-endian float16 [n, 2 * k] -> [n, k]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _words(raw: U8, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(raw).view(dtype)


def _halves(raw: U8) -> U8:
    """[n, k] bytes -> [n, 2 * k]: all low nibbles, then all high ones."""
    return np.concatenate((raw & 15, raw >> 4), axis=1)


def _pairs(raw: U8) -> U8:
    """[n, k] bytes -> [n, 2 * k]: low and high nibble of each byte in turn."""
    return np.stack((raw & 15, raw >> 4), axis=2).reshape(len(raw), -1)


def _chunks(raw: U8, size: int) -> U8:
    """`_halves` of every `size` bytes."""
    return _halves(raw.reshape(-1, size)).reshape(len(raw), -1)


def _planes(raw: U8, size: int, bits: int) -> U8:
    """Every `size` bytes give first all lowest fields of `bits` bits, then all next ones, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    fields = (raw.reshape(len(raw), -1, 1, size) >> shifts) & ((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(len(raw), -1)


def _bits(raw: U8) -> U8:
    """[n, k] bytes -> [n, 8 * k] bits, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little")


def _signed(codes: NDArray[Any], offset: int) -> NDArray[np.int8]:
    return codes.astype(np.int8) - np.int8(offset)


def _legacy(b: U8, bits: int, has_min: bool) -> Parts:
    """32 codes of 4 or 5 bits with one scale, and a minimum if `has_min`."""
    begin = 4 if has_min else 2
    codes: NDArray[Any] = _halves(b[:, -16:])
    scale = _f16(b[:, :2])
    if bits == 5:
        codes = codes | _bits(b[:, begin : begin + 4]) << 4
    return (codes, scale, _f16(b[:, 2:4])) if has_min else (_signed(codes, 2 ** (bits - 1)), scale, None)


def _q8_0(b: U8) -> Parts:
    return b[:, 2:].view(np.int8), _f16(b[:, :2]), None


def _q2_k(b: U8) -> Parts:
    codes = _planes(b[:, 16:80], 32, 2)
    return codes, _f16(b[:, 80:82]) * (b[:, :16] & 15), -(_f16(b[:, 82:84]) * (b[:, :16] >> 4))


def _q3_k(b: U8) -> Parts:
    high = _planes(b[:, :32], 32, 1)
    packed = b[:, 96:108]
    scale = _halves(packed[:, :8]) | _planes(packed[:, 8:], 4, 2) << 4
    codes = _signed(_planes(b[:, 32:96], 32, 2) | high << 2, 4)
    return codes, _f16(b[:, 108:110]) * _signed(scale, 32), None


def _six_bits(b: U8) -> tuple[U8, U8]:
    """The eight scales and the eight minima of 6 bits each in 12 bytes."""
    first, second, both = b[:, :4], b[:, 4:8], b[:, 8:12]
    scale = np.concatenate((first & 63, (both & 15) | (first >> 6) << 4), axis=1)
    return scale, np.concatenate((second & 63, (both >> 4) | (second >> 6) << 4), axis=1)


def _with_minima(b: U8, bits: int) -> Parts:
    """Q4_K or Q5_K."""
    scale, least = _six_bits(b[:, 4:16])
    codes: NDArray[Any] = _chunks(b[:, -128:], 32)
    if bits == 5:
        codes = codes | _planes(b[:, 16:48], 32, 1) << 4
    return codes, _f16(b[:, :2]) * scale, -(_f16(b[:, 2:4]) * least)


def _q6_k(b: U8) -> Parts:
    codes = _chunks(b[:, :128], 64) | _planes(b[:, 128:192], 32, 2) << 4
    return _signed(codes, 32), _f16(b[:, 208:210]) * b[:, 192:208].view(np.int8), None


def _q8_k(b: U8) -> Parts:
    return b[:, 4:260].view(np.int8), _words(b[:, :4], "<f4").astype(np.float32), None


def _points(name: str, index: NDArray[Any], sign: NDArray[np.int8]) -> NDArray[np.int8]:
    """The grid's points of each block [n, points] with the signs [n, ...] of as many numbers."""
    points: NDArray[np.int8] = grid(name)[index].reshape(len(index), -1) * sign.reshape(len(index), -1)
    return points


def _seven_signs(words: NDArray[np.uint32]) -> NDArray[np.int8]:
    """Signs of 32 numbers by the lower 28 bits of each word."""
    signs_of_groups: NDArray[np.int8] = even_signs()[(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127]
    return signs_of_groups


def _iq2_xxs(b: U8) -> Parts:
    words = _words(b[:, 2:], "<u4").reshape(len(b), 8, 2)
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scale = _f16(b[:, :2]) * (0.5 + (words[:, :, 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _points("IQ2_XXS", index, _seven_signs(words[:, :, 1])), scale, None


def _iq2_scale(b: U8, packed: U8) -> F32:
    scale: F32 = _f16(b[:, :2]) * (np.float32(0.5) + _pairs(packed)) * np.float32(0.25)
    return scale


def _iq2_xs(b: U8) -> Parts:
    words = _words(b[:, 2:66], "<u2")
    return _points("IQ2_XS", words & 511, even_signs()[words >> 9]), _iq2_scale(b, b[:, 66:]), None


def _iq2_s(b: U8) -> Parts:
    high = (b[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    index = b[:, 2:34] | high.reshape(len(b), -1).astype(np.uint16) << 8
    return _points("IQ2_S", index, signs()[b[:, 34:66]]), _iq2_scale(b, b[:, 74:]), None


def _iq3_xxs(b: U8) -> Parts:
    words = _words(b[:, 66:], "<u4")
    scale = _f16(b[:, :2]) * (0.5 + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _points("IQ3_XXS", b[:, 2:66], _seven_signs(words)), scale, None


def _iq3_s(b: U8) -> Parts:
    index = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    scale = _f16(b[:, :2]) * (1 + 2 * _pairs(b[:, 106:]))
    return _points("IQ3_S", index, signs()[b[:, 74:106]]), scale, None


def _iq1_s(b: U8) -> Parts:
    words = _words(b[:, 34:], "<u2")
    high = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    index = b[:, 2:34] | high.reshape(len(b), -1) << 8
    scale = _f16(b[:, :2]) * (2 * ((words >> 12) & 7) + 1)
    # Codes are 0 ... 2: the grid's -1 ... 1 and the shift by an eighth go into the minimum.
    shift = np.where(words & 0x8000, np.float32(-1.125), np.float32(-0.875))
    return grid("IQ1_S")[index].reshape(len(b), -1) + np.int8(1), scale, scale * shift


def _iq1_m(b: U8) -> Parts:
    words = _words(b[:, 48:], "<u2")
    shifts = np.array((12, 8, 4, 0), np.uint16)
    d = np.bitwise_or.reduce((words >> 12) << (12 - shifts), axis=1, keepdims=True).astype("<u2").view("<f2")
    scale = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    nibbles = _pairs(b[:, 32:48])
    index = b[:, :32] | (nibbles & 7).astype(np.uint16) << 8
    # Codes in eighths: eight times the grid's -1 ... 1, and one more or less.
    codes = 8 * grid("IQ1_S")[index] + np.where(nibbles & 8, np.int8(-1), np.int8(1))[:, :, None]
    return codes.reshape(len(b), -1), d.astype(np.float32) * (2 * scale.reshape(len(b), -1) + 1) / np.float32(8), None


def _iq4_nl(b: U8) -> Parts:
    return _halves(b[:, 2:]), _f16(b[:, :2]), None


def _iq4_xs(b: U8) -> Parts:
    high = (_words(b[:, 2:4], "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scale = _pairs(b[:, 4:8]) | high.astype(np.uint8) << 4
    return _chunks(b[:, 8:], 16), _f16(b[:, :2]) * _signed(scale, 32), None


def _tq1_0(b: U8) -> Parts:
    powers = np.array((1, 3, 9, 27, 81), np.uint8)[None, :, None]
    pieces = []
    for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        digits = (b[:, None, first:last] * powers[:, :count]).astype(np.uint16) * 3 >> 8
        pieces.append(digits.reshape(len(b), -1))
    return _signed(np.concatenate(pieces, axis=1), 1), _f16(b[:, 52:]), None


def _tq2_0(b: U8) -> Parts:
    return _signed(_planes(b[:, :64], 32, 2), 1), _f16(b[:, 64:]), None


def _mxfp4(b: U8) -> Parts:
    # The values are doubled, so the scale is half of 2^(e - 127).
    return _halves(b[:, 1:]), np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128), None


def _nvfp4(b: U8) -> Parts:
    packed = b[:, :4]
    exponent, digits = (packed >> 3 & 15).astype(np.int32), (packed & 7).astype(np.float32)
    small = digits * np.float32(2.0**-10)
    scale = np.where(exponent == 0, small, np.ldexp(1 + digits / 8, exponent - 8))
    return _chunks(b[:, 4:], 8), np.where(packed == 127, 0, scale), None


TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 32, -8, 7, False, partial(_legacy, bits=4, has_min=False)),
    "Q4_1": BlockType(32, 20, 32, 0, 15, True, partial(_legacy, bits=4, has_min=True)),
    "Q5_0": BlockType(32, 22, 32, -16, 15, False, partial(_legacy, bits=5, has_min=False)),
    "Q5_1": BlockType(32, 24, 32, 0, 31, True, partial(_legacy, bits=5, has_min=True)),
    "Q8_0": BlockType(32, 34, 32, -128, 127, False, _q8_0),
    "Q2_K": BlockType(256, 84, 16, 0, 3, True, _q2_k),
    "Q3_K": BlockType(256, 110, 16, -4, 3, False, _q3_k),
    "Q4_K": BlockType(256, 144, 32, 0, 15, True, partial(_with_minima, bits=4)),
    "Q5_K": BlockType(256, 176, 32, 0, 31, True, partial(_with_minima, bits=5)),
    "Q6_K": BlockType(256, 210, 16, -32, 31, False, _q6_k),
    "Q8_K": BlockType(256, 292, 256, -128, 127, False, _q8_k),
    "IQ2_XXS": BlockType(256, 66, 32, -43, 43, False, _iq2_xxs),
    "IQ2_XS": BlockType(256, 74, 16, -43, 43, False, _iq2_xs),
    "IQ2_S": BlockType(256, 82, 16, -43, 43, False, _iq2_s),
    "IQ3_XXS": BlockType(256, 98, 32, -62, 62, False, _iq3_xxs),
    "IQ3_S": BlockType(256, 110, 32, -15, 15, False, _iq3_s),
    "IQ1_S": BlockType(256, 50, 32, 0, 2, True, _iq1_s),
    "IQ1_M": BlockType(256, 56, 16, -9, 9, False, _iq1_m),
    "IQ4_NL": BlockType(32, 18, 32, -127, 113, False, _iq4_nl, "iq4_nl"),
    "IQ4_XS": BlockType(256, 136, 32, -127, 113, False, _iq4_xs, "iq4_nl"),
    "TQ1_0": BlockType(256, 54, 256, -1, 1, False, _tq1_0),
    "TQ2_0": BlockType(256, 66, 256, -1, 2, False, _tq2_0),
    "MXFP4": BlockType(32, 17, 32, -12, 12, False, _mxfp4, "e2m1"),
    "NVFP4": BlockType(64, 36, 16, -12, 12, False, _nvfp4, "e2m1"),
}
"""By the type's name."""


def decode(kind: str, raw: U8) -> QWeight:
    """Rows of raw blocks, uint8 [rows, bytes of a row], as codes with exact float32 scales and minima.

    Works on some blocks at a time, on a thread for each core. Numbers that overflow come out as infinity.
    """
    block = TYPES[kind]
    blocks = raw.reshape(-1, block.size)
    num, num_groups = len(blocks), block.elements // block.group
    codes = np.empty((num, block.elements), np.int8)
    scales = np.empty((num, num_groups), np.float32)
    mins = np.empty((num, num_groups), np.float32) if block.has_min else None
    step = PIECE_WEIGHTS // block.elements

    def work(first: int) -> None:
        piece = slice(first, first + step)
        with np.errstate(over="ignore", invalid="ignore"):
            codes[piece], scales[piece], least = block.read(blocks[piece])
        if mins is not None:
            mins[piece] = least

    on_all_threads(work, num, step)
    rows = len(raw)
    return QWeight(
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        mins=None if mins is None else mins.reshape(rows, -1),
        group=block.group,
        bits=8,
        codebook=np.array(LEVELS[block.book], np.float32) if block.book else None,
    )


@dataclass(frozen=True, slots=True)
class KBlocks(QWeight):
    """Rows of K-quants as the file has them, for the kernels' packer: codes uint8 [out, bytes of a row]."""

    kind: str = ""

    def __post_init__(self) -> None:
        pass

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] // K_TYPES[self.kind].size * K_BLOCK

    def dequantize(self) -> F32:
        weight: F32 = decode(self.kind, self.codes).dequantize()
        return weight


def k_blocks(kind: str, raw: U8, name: str) -> KBlocks:
    """Rows of raw blocks, uint8 [rows, bytes of a row], copied out of the file. Raises as `check_scales`."""
    check_scales(kind, raw, name)
    return KBlocks(raw.copy(), kind=kind)


def check_scales(kind: str, raw: U8, name: str) -> None:
    """Raises `CheckpointError` with `name` for a K-quant's scale that is not finite."""
    scales = raw.reshape(-1, K_TYPES[kind].size)[:, K_TYPES[kind].scales]
    if ((_words(scales, "<u2") & 0x7C00) == 0x7C00).any():
        raise CheckpointError(f"{name} has a scale that is not finite")


def scheme_for(kinds: set[str], schemes: Collection[Scheme] = SCHEMES) -> Scheme | None:
    """The one of `schemes` with the fewest bits that keeps the codes of all these block types, else int8.

    None if that is not among `schemes`. Groups of more than 64 inputs are cut, so that activations get finer scales; of
    codes of 2 bits, whose activations are floats, to 128.
    """
    blocks = Scheme("k", K_GROUP, dtype=min(kinds))
    if len(kinds) == 1 and kinds <= K_TYPES.keys() and blocks in schemes:
        return blocks
    whole = min(TYPES[kind].group for kind in kinds)
    group = min(whole, 64)
    forms = [Scheme("i2", min(whole, 128), has_zero=has_zero) for has_zero in (False, True)]
    forms += [Scheme("i4", group), *[Scheme("i4", group, book=book) for book in LEVELS], Scheme("i4", group, True)]
    forms += [
        *(Scheme(kind, group, has_min) for kind in ("i5", "i6") for has_min in (False, True)),
        Scheme("i8", group),
    ]
    forms = [scheme for scheme in forms if scheme in schemes]
    rounded = forms[-1] if forms and forms[-1].kind == "i8" else None
    return next((scheme for scheme in forms if all(keeps_codes(kind, scheme) for kind in kinds)), rounded)


def keeps_codes(kind: str, scheme: Scheme) -> bool:
    """Return whether weights of a block type get that form by rounding no more than scales and minima, to float16."""
    block = TYPES[kind]
    if scheme.book:
        return block.book == scheme.book
    if scheme.has_min:
        return block.high - block.low < 2**scheme.bits or kind == "IQ3_S"
    if scheme.has_zero:
        return not block.has_min and not block.book and block.high - block.low < 2**scheme.bits
    half = 2 ** (scheme.bits - 1)
    return not block.has_min and block.low >= -half and block.high < half


def native(weight: QWeight, kind: str, scheme: Scheme, name: str) -> QWeight:
    """The result of `decode` in the form `scheme`: the same codes where `keeps_codes`, else rounded to nearest anew.

    Raises `CheckpointError` with `name` for a scale that float16 cannot hold.
    """
    if weight.scales is None or not keeps_codes(kind, scheme):
        return rtn.quantise(weight.dequantize(), scheme, name)
    codes, scales, mins, low = weight.codes, weight.scales, weight.mins, TYPES[kind].low
    if weight.codebook is not None and not scheme.book:
        codes = weight.codebook.astype(np.int8)[codes]
    if scheme.has_min and kind == "IQ3_S" and scheme.bits == 4:  # odd numbers from -15 to 15
        codes, scales, mins = (codes + 15) // 2, scales * 2, scales * -15
    elif scheme.has_min and mins is None:
        codes, mins = codes - low, scales * low
    zero = -low if scheme.has_zero else scheme.middle
    codes = codes + zero
    share = weight.group // scheme.group
    zeros = np.broadcast_to(np.float32(zero), (len(codes), -(-codes.shape[1] // scheme.group)))
    return replace(
        weight,
        codes=codes,
        scales=repeated(_rounded(scales, name), share),
        mins=None if mins is None else repeated(_rounded(mins, name), share),
        zeros=zeros if zero else None,
        group=scheme.group,
        bits=scheme.bits,
        codebook=weight.codebook if scheme.book else None,
    )


def _rounded(values: F32, name: str) -> F32:
    """The nearest float16, as float32."""
    rounded = half(values)
    if not np.isfinite(rounded).all():
        raise CheckpointError(f"{name} has a scale that is not finite or beyond float16; it can not be quantised")
    return rounded
