"""The likeliest token of a row: the lowest of equals, and what is not finite is reported."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.interpreter import run_interpreted
from torch import Tensor

from headrace.backends.cuda.kernels.best import KERNEL, best, make_space
from headrace.backends.cuda.launch import Config, Launch

WIDTH = 2500
Order = Callable[[int], list[int]] | None


def logits() -> Tensor:
    x = torch.randn(8, WIDTH + 28, generator=torch.Generator().manual_seed(1))[:, :WIDTH]
    x[1] = -torch.inf
    # 40 and 1064 are of one lane where a block has 1,024 columns.
    x[2, [40, 1064, 1100, 2400]] = 9.0
    x[3, 7] = torch.nan
    x[4, 2499] = torch.inf
    x[5, :2499] = -torch.inf
    return x


def run(x: Tensor, mode: str, config: Config, order: Order = None) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.full((8,), -7, dtype=torch.int32)
    values, finite = torch.full((8,), -7.0), torch.full((8,), -7, dtype=torch.int32)
    sizes = torch.tensor([0, 0, 7], dtype=torch.int32)
    space = make_space(8, "cpu")
    launch = best(x, space, ids, values, finite, sizes, 2, config)
    launch.run_twin() if mode == "twin" else run_interpreted(launch, order)
    assert not any(part.any() for part in space), "what the programs of a row share is not reset"
    return ids, values, finite


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize("config", KERNEL.configs, ids=lambda config: config.name)
def test_the_lowest_of_the_greatest_wins(config: Config, mode: str) -> None:
    x = logits()
    ids, values, finite = run(x, mode, config)
    fit = [0, 2, 5, 6]
    assert ids[fit].tolist() == np.argmax(x[fit].numpy(), 1).tolist()
    assert torch.equal(values[fit], x[fit].amax(-1))
    assert values[1] == -torch.inf
    assert finite.tolist() == [1, 1, 1, 0, 0, 1, 1, -7], "row 7 is not one of the step's"
    assert ids[7] == -7


def test_parts_may_arrive_in_any_order() -> None:
    x, config = logits(), Config({"BLOCK": 256})
    forwards, backwards = (run(x, "interpreted", config, order) for order in (None, lambda num: list(range(num))[::-1]))
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert forwards[0][2] == 40


def launches() -> list[Launch]:
    """The likeliest of Llama 3's tokens, in every configuration."""
    floats, ints = torch.empty(256, 128_256, device="meta"), torch.empty(256, dtype=torch.int32, device="meta")
    space = make_space(256, "meta")
    return [best(floats, space, ints, floats[:, 0], ints, ints, 2, config) for config in KERNEL.configs]
