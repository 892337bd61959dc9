"""The noise of float32 in kernels is as near to the sampler's as its docstring proves, at both ends too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from tests.support.interpreter import interpret

from headrace.backends.cuda.kernels.noise import NEAR, gumbel, near_gumbel, philox
from headrace.backends.cuda.kernels.survey import EPS
from headrace.sampling import noise

F32 = NDArray[np.float32]


def modelled(words: NDArray[np.uint64], series_until: float = 0.02) -> F32:
    """`near_gumbel` in numpy's float32."""
    high, low = (words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32)
    small = high < 2**31
    high, low = np.where(small, high, ~high), np.where(small, low, ~low) >> np.uint32(12)
    t = high.astype(np.float32) * np.float32(2**-32) + (low.astype(np.float32) + np.float32(0.5)) * np.float32(2**-52)
    third, half, one = np.float32(1 / 3), np.float32(0.5), np.float32(1)
    with np.errstate(divide="ignore"):
        y = -np.log(np.where(small, t, one - t))
        series = t * (one + t * (half + t * (third + t * np.float32(0.25))))
        numbers: F32 = -np.log(np.where(small | (t >= np.float32(series_until)), y, series))
    return numbers


def hard_words() -> NDArray[np.uint64]:
    """Two million words, of which a half lies by the ends: as many for each number of leading zeros or ones."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**64, 2_000_000, dtype=np.uint64)
    words[::2] >>= rng.integers(0, 64, 1_000_000, dtype=np.uint64)
    words[::4] = ~words[::4]
    words[:4] = 0, 2**64 - 1, 2**63, 2**63 - 1
    return words


def test_float32_is_within_its_bound() -> None:
    words = hard_words()
    off = np.abs(modelled(words) - noise.gumbel(words))
    assert 1e-7 < off.max() < NEAR
    # Beside it: three roundings of a scaled logit of 42 at most, and that of a sum of 79 at most.
    unit = 2.0**-24
    assert 2 * (NEAR + 3 * 42 * unit + 79 * unit) < EPS.value / 10


def test_control_a_worse_logarithm_is_noticed() -> None:
    words = hard_words()
    assert np.abs(modelled(words, 1e-4) - noise.gumbel(words)).max() > NEAR


@triton.jit
def _both(seed, position, near, exact, SIZE: tl.constexpr):
    c0, c1, c2, c3 = philox(tl.arange(0, SIZE // 2), tl.load(seed), tl.load(position))
    token = tl.arange(0, SIZE)
    tl.store(near + token, tl.interleave(near_gumbel(c0, c1), near_gumbel(c2, c3)))
    tl.store(exact + token, gumbel(token, tl.load(seed), tl.load(position)))


def test_kernels_compute_the_samplers_noise() -> None:
    for seed, position in ((2**64 - 3, 2**40 + 1), (5, 0)):
        near, exact = torch.zeros(4096), torch.zeros(4096, dtype=torch.float64)
        arguments: dict[str, Any] = {"seed": torch.tensor([seed - 2**64 if seed >= 2**63 else seed])}
        arguments |= {"position": torch.tensor([position]), "near": near, "exact": exact, "SIZE": 4096}
        interpret(_both, (1,), arguments)
        words = noise.bits_of_all(seed, position, 4096)
        assert np.array_equal(exact.numpy(), noise.gumbel(words))
        assert np.abs(near.numpy() - modelled(words)).max() < 1e-5
        assert np.abs(near.numpy() - exact.numpy()).max() < NEAR
