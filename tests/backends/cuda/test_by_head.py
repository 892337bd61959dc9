"""Products by head: against their twin and float64, the same bits in any tile and company, tails as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.support.kernels import DTYPES, assert_close, assert_twin_agrees, backwards, poisoned, written
from torch import Tensor

from headrace.backends.cuda.kernels import by_head as kernel
from headrace.backends.cuda.launch import Config, Launch

HEADS, NUM_IN, NUM_OUT, TAIL = 3, 40, 70, 9
SIZES = torch.tensor([20, 0, 0, 0], dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launches() -> list[Launch]:
    """DeepSeek-V3's products of queries and of values in every configuration, and one in float32."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    sizes, wide = meta(4, dtype=torch.int32), torch.float32
    listed = []
    for num_in, num_out, tail in ((128, 512, 64), (512, 128, 0)):
        x, weights, out = meta(64, 16 * (num_in + tail)), meta(16, num_out, num_in), meta(64, 16 * (num_out + tail))
        for config in kernel.configs(torch.bfloat16):
            listed.append(kernel.by_head(x, weights, out, sizes, 0, 64, tail, config))
    x, weights, out = meta(64, 16 * 192, dtype=wide), meta(16, 512, 128, dtype=wide), meta(64, 16 * 576, dtype=wide)
    return [*listed, kernel.by_head(x, weights, out, sizes, 0, 64, 64)]


class Problem:
    def __init__(self, dtype: torch.dtype, tail: int) -> None:
        self.x = random(21, HEADS * (NUM_IN + tail) + 5, dtype=dtype)[:, : HEADS * (NUM_IN + tail)]
        self.weights, self.tail = random(HEADS, NUM_OUT, NUM_IN, dtype=dtype, seed=1), tail
        self.outputs = {"out": poisoned(21, HEADS * (NUM_OUT + tail), dtype=dtype)}

    def make(self, out: Mapping[str, Tensor], config: Config | None = None, first: int = 0) -> Sequence[Launch]:
        return [kernel.by_head(self.x[first:], self.weights, out["out"], SIZES - first, 0, 24, self.tail, config)]

    def exact(self) -> Tensor:
        by_head = self.x[:20].double().view(20, HEADS, -1)
        products = torch.einsum("rhi,hoi->rho", by_head[..., :NUM_IN], self.weights.double())
        return torch.cat([products, by_head[..., NUM_IN:]], -1).flatten(1)


@pytest.mark.parametrize("tail", [0, TAIL])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_writes_what_its_twin_writes(dtype: torch.dtype, tail: int) -> None:
    problem = Problem(dtype, tail)
    assert_twin_agrees(problem.make, problem.outputs)
    out = written(problem.make, problem.outputs, "interpreted")["out"]
    assert_close(out[:20], problem.exact())
    assert out[20].isnan().all(), "a row beyond the step's rows was written"
    if tail:
        assert torch.equal(out[3, NUM_OUT : NUM_OUT + tail], problem.x[3, NUM_IN : NUM_IN + tail])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_row_has_the_same_bits_in_any_tile_alone_and_among_others(mode: str) -> None:
    problem = Problem(torch.bfloat16, TAIL)
    together = written(problem.make, problem.outputs, mode)["out"]
    other = Config({"BR": 32, "BN": 32, "BK": 16}, 4)
    for config in (other, *kernel.configs(torch.bfloat16)):
        out = written(lambda out, c=config: problem.make(out, c), problem.outputs, mode, backwards)["out"]
        assert torch.equal(out[:20], together[:20])
    alone = written(lambda out: problem.make(out, first=19), problem.outputs, mode)["out"]
    assert torch.equal(alone[0], together[19])


def test_control_a_head_with_its_neighbours_matrix_is_noticed() -> None:
    problem = Problem(torch.float32, 0)
    out = written(problem.make, problem.outputs, "interpreted")["out"][:20]
    problem.weights = problem.weights.roll(1, 0)
    with pytest.raises(AssertionError, match="differ by"):
        assert_close(out, problem.exact())
