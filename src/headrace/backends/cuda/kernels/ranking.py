"""What the kernels of the draw share: a row's parameters, logits under a mask, ranks, weights, and bins."""

from __future__ import annotations

import triton
import triton.language as tl

NUM_BINS = tl.constexpr(64)
"""Bins of tokens by their distance from the likeliest (`bin_of`)."""

LAST_BIN = tl.constexpr(62)
"""The last bin whose tokens can be drawn: those of the next are further than 42 below the likeliest."""

INT32_MAX = tl.constexpr(2147483647)


@triton.jit
def parameters_of(reals, wholes, row):
    """-> temperature, floor, top_p, top_k, seed, position, flags."""
    at, to = reals + 3 * row, wholes + 4 * row
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(to), tl.load(to + 1), tl.load(to + 2), tl.load(to + 3)


@triton.jit
def has_cut(flags, top_k, top_p, width):
    """Whether a row is drawn under top-k or top-p."""
    return ((flags & 1) == 1) & ((top_p < 1.0) | ((top_k > 0) & (top_k < width)))


@triton.jit
def logits_of(logits, masks, token, width, masked):
    """Logits, -inf where a token is not allowed; -0 becomes 0, which ranks like it."""
    inside = token < width
    x = tl.load(logits + token, mask=inside, other=float("-inf")) + 0.0
    if masked:
        word = tl.load(masks + (token >> 5), mask=inside, other=0)
        x = tl.where((word >> (token & 31)) & 1 == 1, x, float("-inf"))
    return x


@triton.jit
def greatest_of(values, highest, row, masked, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The greatest logit of a row, of its allowed tokens if it is masked; finite, and not -0."""
    greatest = tl.load(values + row)
    if masked:
        part = tl.arange(0, LANES)
        greatest = tl.max(tl.load(highest + row * PARTS + part, mask=part < PARTS, other=float("-inf")), 0)
    return tl.maximum(greatest, -3.4028234663852886e38) + 0.0


@triton.jit
def scaled_of(x, greatest, temperature):
    return (x.to(tl.float64) - greatest.to(tl.float64)) / temperature


@triton.jit
def weights(scaled):
    """`sampling.filters.weights`: round(exp(scaled) * 2**44), by the same products and sums."""
    t = tl.maximum(scaled, -700.0)
    z = t * 1.4426950408889634 + 6755399441055744.0
    n = z - 6755399441055744.0
    t = t - n * 0.6931471803691238
    t = t - n * 1.9082149292705877e-10
    p = t * 0.0 + 2.08767569878681e-09
    p = p * t + 2.505210838544172e-08
    p = p * t + 2.755731922398589e-07
    p = p * t + 2.7557319223985893e-06
    p = p * t + 2.48015873015873e-05
    p = p * t + 0.0001984126984126984
    p = p * t + 0.001388888888888889
    p = p * t + 0.008333333333333333
    p = p * t + 0.041666666666666664
    p = p * t + 0.16666666666666666
    p = p * t + 0.5
    p = p * t + 1.0
    p = p * t + 1.0
    power = (z.to(tl.int64, bitcast=True) - 0x4338000000000000 + (1023 + 44)) << 52
    p = p * power.to(tl.float64, bitcast=True) + 4503599627370496.0
    return p.to(tl.int64, bitcast=True) - 0x4330000000000000


@triton.jit
def scale_of(temperature):
    """1 / temperature in float32; 0 if it is extreme, where float32 has no room for it."""
    usual = (temperature > 1e-30) & (temperature < 1e30)
    return tl.where(usual, 1.0 / tl.where(usual, temperature, 1.0), 0.0).to(tl.float32)


@triton.jit
def bin_of(x, greatest, scale):
    """The bin of each token by d = (greatest - x) / temperature: a quarter wide up to 8, then 1 / 0.9.

    In float32, so edges are off by 1e-5 at most; but each step keeps the order of logits, so no token's bin is lower
    than that of a greater logit. With the scale 0 of an extreme temperature all lie in the first bin.
    """
    d = tl.where(scale > 0.0, (greatest - x) * scale, 0.0)
    return tl.minimum(tl.maximum(tl.minimum(d * 4.0, 32.0 + (d - 8.0) * 0.9), 0.0), 63.0).to(tl.int32)


@triton.jit
def key_of(x):
    """An integer for each logit, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def logit_of(key):
    """The logit of a key."""
    bits = tl.where(key >= 2147483648, key ^ 2147483648, key ^ 4294967295).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def merged(best, winner, second, width):
    """-> the greatest of sums, the least id that has it, and the next sum: of `best` with their ids, and of `second`,
    sums that are the next ones of their lanes."""
    most = tl.max(best, 0)
    one = tl.min(tl.where(best == most, winner, width), 0)
    rest = tl.maximum(tl.max(tl.where(winner == one, float("-inf"), best), 0), tl.max(second, 0))
    return most, one, rest
