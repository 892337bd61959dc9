"""Tokens drawn on the GPU are those that the sampler draws from the same logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.support.cubin import compiled
from tests.support.interpreter import run_interpreted

from headrace.backends.cuda.kernels.choose import KERNEL, MARGIN, Packed, choose, pack
from headrace.backends.cuda.launch import Config, Launch
from headrace.backends.step import Draw
from headrace.sampling import filters, noise

WIDTH = 3001


def rows() -> torch.Tensor:
    """Logits with equal numbers, zeros of both signs and -inf among them."""
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3)) * 4
    x[1] = (x[1] * 2).round() / 2
    x[2, ::3] = 0.0
    x[2, 1::3] = -0.0
    x[3, :2990] = -torch.inf
    x[4] = x[4].clamp(max=1.0)
    return x


DRAWS = [
    Draw(0.0),
    Draw(1.0, seed=2**64 - 5, position=2**33 + 1),
    Draw(0.7, top_k=1, seed=1, position=2),
    Draw(0.7, top_k=50, seed=1, position=2),
    Draw(1.3, top_p=0.9, seed=7, position=3),
    Draw(0.9, top_k=40, top_p=0.5, seed=7, position=3),
    Draw(1.0, floor=float(np.log(0.1)), top_k=500, top_p=0.95, seed=11, position=5),
    Draw(1e-4, top_p=0.3, seed=11, position=5),
    Draw(2.0, top_p=1e-6, seed=12, position=6),
]


def mask(row: int) -> np.ndarray:
    bits = np.random.default_rng(row).random(-(-WIDTH // 32) * 32) < 0.5
    return np.packbits(bits, bitorder="little").view(np.uint32)


def run(x: torch.Tensor, draws: list[Draw], mode: str, config: Config) -> tuple[list[int], list[float]]:
    num = len(draws)
    reals, wholes = torch.zeros(num, 3, dtype=torch.float64), torch.zeros(num, 4, dtype=torch.int64)
    masks, scratch = torch.zeros(num, -(-WIDTH // 32), dtype=torch.int32), torch.full((num, 256), -1)
    ids, margins = torch.full((num,), -7, dtype=torch.int32), torch.zeros(num, dtype=torch.float64)
    pack(list(range(num)), draws, reals.numpy(), wholes.numpy(), masks.numpy())
    sizes = torch.tensor([0, 0, num], dtype=torch.int32)
    launch = choose(x, Packed(reals, wholes, masks), scratch, ids, margins, sizes, 2, config)
    launch.run_twin() if mode == "twin" else run_interpreted(launch)
    return ids.tolist(), margins.tolist()


def expected(x: np.ndarray, draw: Draw) -> int:
    x = x.copy()
    if draw.mask is not None:
        x[np.unpackbits(draw.mask.view(np.uint8), bitorder="little")[:WIDTH] == 0] = -np.inf
    if draw.temperature == 0:
        return int(np.argmax(x))
    pool = filters.select(x, float(x.max()), filters.Cut(draw.temperature, draw.floor, draw.top_k, draw.top_p))
    return int(
        pool.token_ids[np.argmax(pool.scaled + noise.gumbel(noise.bits(draw.seed, draw.position, pool.token_ids)))]
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_the_kernel_draws_the_samplers_tokens(draw: Draw, masked: bool) -> None:
    x = rows()[: 2 if draw.top_k > 100 else None]  # the interpreter is slow with many candidates
    draws = [draw._replace(mask=mask(i), position=draw.position + i) if masked else draw for i in range(len(x))]
    reference = [expected(x[i].numpy(), each) for i, each in enumerate(draws)]
    for mode in ("twin", "interpreted"):
        ids, margins = run(x, draws, mode, Config({"BLOCK": 1024}))
        assert ids == reference, mode
        assert all(margin >= 0 for margin in margins)
        assert all(margin > MARGIN for margin, each in zip(margins, draws, strict=True) if each.temperature > 0)


def test_no_allowed_token_is_reported() -> None:
    x = rows()[:1]
    nothing = np.zeros(-(-WIDTH // 32), np.uint32)
    assert run(x, [Draw(1.0, mask=nothing)], "interpreted", Config({"BLOCK": 1024}))[0] == [-1]
    assert run(x, [Draw(0.0, mask=nothing)], "twin", Config({"BLOCK": 1024}))[0] == [-1]


def test_sums_that_are_almost_equal_have_a_small_margin() -> None:
    """Two tokens whose noise is outweighed to the last bits: the host must decide."""
    x = torch.full((1, WIDTH), -50.0)
    words = noise.gumbel(noise.bits(3, 4, np.array([5, 9])))
    x[0, 5], x[0, 9] = 0.0, float(words[0] - words[1])
    ids, margins = run(x, [Draw(1.0, top_k=2, seed=3, position=4)], "interpreted", Config({"BLOCK": 1024}))
    assert ids[0] in (5, 9)
    assert margins[0] < 1e-6


@pytest.mark.slow
def test_the_block_changes_no_token() -> None:
    x = rows()
    draws = [each._replace(position=i) for i, each in enumerate(DRAWS[3:9])]
    results = [run(x, draws, "interpreted", Config({"BLOCK": size}))[0] for size in (512, 2048, 4096)]
    assert results[0] == results[1] == results[2]


def launches(fuse: bool = False) -> list[Launch]:
    """Drawing 256 rows of Llama 3's vocabulary."""
    num, width = 256, 128_256

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    launch = choose(
        empty(num, width, dtype=torch.float32),
        Packed(
            empty(num, 3, dtype=torch.float64), empty(num, 4, dtype=torch.int64),
            empty(num, width // 32, dtype=torch.int32),
        ),
        empty(num, 256, dtype=torch.int64),
        empty(num, dtype=torch.int32), empty(num, dtype=torch.float64), empty(4, dtype=torch.int32), 2,
    )  # fmt: skip
    kernel = dataclasses.replace(launch.kernel, fuse=fuse)
    return [dataclasses.replace(launch, kernel=kernel, config=config) for config in KERNEL.configs]


def num_fused(launch: Launch) -> int:
    """Fused multiplications and additions of float64 for each token of a thread, beside the 32 in two logarithms."""
    tokens = launch.config.tiles["BLOCK"] // (32 * launch.config.num_warps)
    return compiled(launch, 90).ptx.count("fma.rn.f64") - 32 * tokens


@pytest.mark.slow
def test_no_product_is_fused_with_a_sum() -> None:
    assert [num_fused(launch) for launch in launches()] == [0] * len(KERNEL.configs)


@pytest.mark.slow
def test_fused_products_would_be_seen() -> None:
    assert num_fused(launches(fuse=True)[0]) > 0
