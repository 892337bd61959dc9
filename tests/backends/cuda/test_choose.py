"""Tokens drawn on the GPU are those that the sampler draws from the same logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.support.cubin import CAPABILITIES, compiled, faults
from tests.support.interpreter import run_interpreted

from headrace.backends.cuda.kernels.choose import KERNELS, MARGIN, Packed, choose, make_space, pack
from headrace.backends.cuda.kernels.survey import EPS as EPS_OF_KERNEL
from headrace.backends.cuda.kernels.survey import SURVEY, draw_part
from headrace.backends.cuda.launch import Launch
from headrace.backends.step import Draw
from headrace.sampling import filters, noise

WIDTH = 3001
EPS = EPS_OF_KERNEL.value
LEFT_OUT = Draw(-1.0)


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


def run(
    x: torch.Tensor, draws: list[Draw], mode: str, block: int = 1024, room: int = 512, order: Any = None
) -> tuple[list[int], list[float]]:
    num, width = len(draws), x.shape[1]
    reals, wholes = torch.zeros(num, 3, dtype=torch.float64), torch.zeros(num, 4, dtype=torch.int64)
    masks, space = torch.zeros(num, -(-width // 32), dtype=torch.int32), make_space(num, width, "cpu", room, block)
    for name, part in space._asdict().items():
        if name != "arrived":
            part.fill_(-1)
    ids, margins = torch.full((num,), -7, dtype=torch.int32), torch.full((num,), -7.0, dtype=torch.float64)
    indices = [i for i, each in enumerate(draws) if each is not LEFT_OUT]
    pack(indices, [draws[i] for i in indices], reals.numpy(), wholes.numpy(), masks.numpy())
    sizes = torch.tensor([0, 0, num], dtype=torch.int32)
    packed, values = Packed(reals, wholes, masks), x.amax(-1)
    for launch in choose(x, packed, values, space, ids, margins, sizes, 2, block=block, last_block=512):
        # As on a GPU, infinite numbers are no errors.
        with np.errstate(over="ignore", invalid="ignore"):
            launch.run_twin() if mode == "twin" else run_interpreted(launch, order)
    assert not space.arrived.any()
    return ids.tolist(), margins.tolist()


def expected(x: np.ndarray, draw: Draw) -> int:
    x = x.copy()
    if draw.mask is not None:
        x[np.unpackbits(draw.mask.view(np.uint8), bitorder="little")[: len(x)] == 0] = -np.inf
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
        ids, margins = run(x, draws, mode)
        assert ids == reference, mode
        assert all(margin >= 0 for margin in margins)
        assert all(margin > MARGIN for margin, each in zip(margins, draws, strict=True) if each.temperature > 0)


def test_rows_without_cuts_are_drawn_as_by_the_sampler() -> None:
    """Most winners lie far below the likeliest token, and in either part of a row."""
    x = 3 * torch.randn(24, HARD, generator=torch.Generator().manual_seed(8))
    floors = (-float("inf"), -float("inf"), -6.0)
    draws = [Draw((0.7, 1.0, 2.5)[i % 3], floor=floors[i % 3], seed=i * 2**33 + 1, position=i) for i in range(24)]
    reference = [expected(x[i].numpy(), each) for i, each in enumerate(draws)]
    behind = [float(x[i].max() - x[i, token]) / draws[i].temperature for i, token in enumerate(reference)]
    assert sum(each > 3 for each in behind) > 5
    assert run(x, draws, "interpreted", block=512)[0] == reference


def test_no_allowed_token_is_reported() -> None:
    x = rows()[:1]
    nothing = np.zeros(-(-WIDTH // 32), np.uint32)
    assert run(x, [Draw(1.0, mask=nothing)], "interpreted")[0] == [-1]
    assert run(x, [Draw(0.0, mask=nothing)], "twin")[0] == [-1]


@pytest.mark.parametrize("top_k", [0, 2])
def test_sums_that_are_almost_equal_have_a_small_margin(top_k: int) -> None:
    """Two tokens whose noise is outweighed to the last bits: the host must decide."""
    x = torch.full((1, WIDTH), -50.0)
    words = noise.gumbel(noise.bits(3, 4, np.array([5, 9])))
    x[0, 5], x[0, 9] = 0.0, float(words[0] - words[1])
    ids, margins = run(x, [Draw(1.0, top_k=top_k, seed=3, position=4)], "interpreted")
    assert ids[0] in (5, 9)
    assert margins[0] < 1e-6


def test_control_a_bound_without_the_error_of_float32_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = draw_part.fn.__globals__
    monkeypatch.setitem(scope, "EPS", tl.constexpr(-1.0))
    with pytest.raises(AssertionError):
        test_sums_that_are_almost_equal_have_a_small_margin(0)


def test_a_row_that_is_left_out_is_not_touched() -> None:
    draws = [Draw(1.0, top_k=3, seed=1, position=1), LEFT_OUT, Draw(1.0, seed=1, position=2)]
    for mode in ("twin", "interpreted"):
        ids, margins = run(rows()[:3], draws, mode)
        assert (ids[1], margins[1]) == (-7, -7.0)
        assert -7 not in (ids[0], ids[2])


@pytest.mark.slow
def test_the_size_of_parts_and_their_order_change_no_token() -> None:
    x = rows()
    draws = [each._replace(position=i) for i, each in enumerate(DRAWS[3:9])]
    sizes = [(128, 64, None), (2048, 512, None), (512, 4096, lambda num: list(range(num))[::-1])]
    results = [run(x, draws, "interpreted", *size) for size in sizes]
    assert results[0] == results[1] == results[2]


HARD = 700
"""Tokens of the hard rows: two whole parts of 256 and a shorter one."""
EDGES = [0, 63, 64, 255, 256, 300, 511, 512, 640, 699]
TEMPERATURES = [1e-40, 1e-3, 0.05, 0.7, 1.0, 1.3, 100.0, 1e35]
CUTS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_k": 100, "top_p": 0.5},
    {"floor": -2.0},
    {"top_p": 0.999, "floor": -3.0},
    {"top_k": 699, "top_p": 1e-9},
    {"top_k": 40, "floor": -0.5},
    {"top_p": 1 - 2.0**-53},
    {"top_k": 1, "top_p": 0.99},
]


def hard_rows() -> dict[str, torch.Tensor]:
    noise_like = torch.randn(HARD, generator=torch.Generator().manual_seed(4))
    zeros = torch.zeros(HARD)
    low = zeros - 20
    listed = {
        "usual": 4 * noise_like,
        "ties": (2 * noise_like).round() / 2,
        "flat": zeros + 3.25,
        "one dominant": zeros.index_fill(0, torch.tensor(500), 60.0),
        "runs of -inf": torch.where(torch.arange(HARD) // 128 % 2 == 0, -torch.inf, noise_like),
        "zeros of both signs": torch.where(noise_like > 0, 0.0, -0.0),
        "denormals": (3 * noise_like).round() * 1e-45,
        "edges of parts": low.index_fill(0, torch.tensor(EDGES), 5.0),
        "edges of bins": -0.25 * (torch.arange(HARD) * 7 % 64),
        "huge": 3e38 * noise_like.clamp(-1, 1),
        "far from 0": 1e4 + noise_like,
        "one is allowed": (zeros - torch.inf).index_fill(0, torch.tensor(300), -7.0),
    }
    return listed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", hard_rows())
def test_hard_rows_are_drawn_as_by_the_sampler(name: str) -> None:
    """Under each temperature and cut, with so little room that some rows are looked at whole."""
    turn = list(hard_rows()).index(name)
    draws = [
        Draw(warmth, seed=2**40 * turn + i, position=i, **CUTS[(turn + 3 * i) % len(CUTS)])
        for i, warmth in enumerate(TEMPERATURES)
    ]
    x = hard_rows()[name].repeat(len(draws), 1)
    ids, margins = run(x, draws, "interpreted", block=256, room=48)
    twins, their_margins = run(x, draws, "twin")
    for mine, theirs, margin, their_margin, draw in zip(ids, twins, margins, their_margins, draws, strict=True):
        assert mine == theirs, draw
        assert margin == pytest.approx(their_margin, abs=1e-9) or min(margin, their_margin) > EPS / 2, draw


def launches(fuse: bool = False, width: int = 128_256) -> list[Launch]:
    """Drawing 256 rows of Llama 3's vocabulary."""
    num = 256

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    packed = Packed(
        empty(num, 3, dtype=torch.float64),
        empty(num, 4, dtype=torch.int64),
        empty(num, width // 32, dtype=torch.int32),
    )
    listed = choose(
        empty(num, width, dtype=torch.float32), packed, empty(num, dtype=torch.float32),
        make_space(num, width, "meta"), empty(num, dtype=torch.int32), empty(num, dtype=torch.float64),
        empty(4, dtype=torch.int32), 2,
    )  # fmt: skip
    return [dataclasses.replace(each, kernel=dataclasses.replace(each.kernel, fuse=fuse)) for each in listed]


@pytest.mark.slow
def test_the_widest_vocabulary_has_room_in_registers() -> None:
    """The last of a row's programs has what all of its parts counted."""
    (survey,) = [each for each in launches(width=262_144) if each.kernel.jit is SURVEY.jit]
    assert not [fault for capability in CAPABILITIES for fault in faults(compiled(survey, capability))]


NUM_DRAWN = {"_highest": 0, "_survey": 1, "_pick": 0, "_settle": 2}
"""Tokens of a thread whose noise is computed in float64."""


def num_fused(launch: Launch) -> int:
    """Fused multiplications and additions of float64, beside the 32 in the two logarithms of each token of a thread."""
    return compiled(launch, 90).ptx.count("fma.rn.f64") - 32 * NUM_DRAWN[launch.kernel.name]


@pytest.mark.slow
def test_no_product_is_fused_with_a_sum() -> None:
    assert [num_fused(launch) for launch in launches()] == [0] * len(KERNELS)


@pytest.mark.slow
def test_fused_products_would_be_seen() -> None:
    assert num_fused(launches(fuse=True)[1]) > 0
    assert num_fused(launches(fuse=True)[3]) > 0
