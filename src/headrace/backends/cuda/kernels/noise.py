"""Keyed Gumbel noise within kernels: `sampling.noise` in float64, and its like in float32.

`near_gumbel` is within `NEAR` of `gumbel`, for every word; see there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(pair, seed, position):
    """Philox4x32-10: the upper and lower halves of the words of token 2 * pair, then those of token 2 * pair + 1."""
    c0 = pair.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = tl.zeros_like(c0) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32)), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32)), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(token, seed, position):
    """`sampling.noise`: the Gumbel variate of each token id under a key, in float64."""
    c0, c1, c2, c3 = philox(token >> 1, seed, position)
    odd = (token & 1) == 1
    word = (tl.where(odd, c2, c0).to(tl.uint64) << 32) | tl.where(odd, c3, c1).to(tl.uint64)
    u = ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@triton.jit
def near_gumbel(high, low):
    """The Gumbel variate in float32, from both halves of a token's word.

    With u = (w + 1/2) / 2**52, w the upper 52 bits of the word, it is -log(y), y = -log(u). Its error is the relative
    error of y, and that of the outer logarithm. Let e = 2**-24, half a unit in the last place, and a logarithm be
    right to 2 units, 4e. t is the lesser of u and 1 - u, from the word or its complement, whose upper 52 bits are
    those of 2**52 - 1 - w. It is a sum of two positive terms, each rounded at most once: a relative error of 2e. Then
    - u < 1/2: y = -log(t) >= 0.69 has an absolute error of 2e, and 4e of itself: at most 7e of itself;
    - 1 - u >= 0.02: 1 - t >= 1/2 has an absolute error of 2e t + e/2, so its logarithm one of 4e t + e, and 4e of
      itself; as y >= t that is at most 4e + 50e + 4e = 58e of y;
    - 1 - u < 0.02: y = t + t**2/2 + t**3/3 + t**4/4 + ... The rest is less than t**4/4 = 4e-8 = 0.7e of y; the
      error of t counts 2.1e, the roundings 4e: 7e.
    The variate lies between -3.6 and 36.8, so the outer logarithm adds at most 4e * 36.8 = 148e. In all: 206e, 1.3e-5.
    """
    small = high < 2147483648
    high = tl.where(small, high, high ^ 4294967295)
    low = tl.where(small, low, low ^ 4294967295) >> 12
    t = high.to(tl.float32) * 2.3283064365386963e-10 + (low.to(tl.float32) + 0.5) * 2.220446049250313e-16
    y = -tl.log(tl.where(small, t, 1.0 - t))
    series = t * (1.0 + t * (0.5 + t * (0.3333333432674408 + t * 0.25)))
    return -tl.log(tl.where(small | (t >= 0.02), y, series))


NEAR = 1.3e-5
"""How far `near_gumbel` is from `gumbel` at most."""
