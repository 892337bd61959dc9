"""The activation xIELU: against its twin and float64, near 0 and far from it, and in any tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.support.interpreter import run_interpreted
from tests.support.kernels import DTYPES, assert_twin_agrees, poisoned, written
from torch import Tensor

from headrace.backends.cuda.kernels.rows import CONFIGS
from headrace.backends.cuda.kernels.xielu import xielu
from headrace.backends.cuda.launch import Config, Launch

SIZES = torch.tensor([0, 4, 0, 0], dtype=torch.int32)
FACTORS = {"positive": 0.8, "negative": 1.3, "beta": 0.5}


def launches() -> list[Launch]:
    x, sizes = (torch.empty(256, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(4, dtype=torch.int32))
    return [xielu(x, x, sizes, 0, 256, **FACTORS, config=config) for config in CONFIGS]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_writes_what_its_twin_writes(dtype: torch.dtype) -> None:
    x = 3 * torch.randn(5, 112, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :100]

    def make(out: Mapping[str, Tensor], config: Config = Config({"COLUMNS": 64}, 1)) -> Sequence[Launch]:
        return [xielu(x, out["out"], SIZES, 1, 6, **FACTORS, config=config)]

    outputs = {"out": poisoned(5, 100, dtype=dtype)}
    assert_twin_agrees(make, outputs)
    out = written(make, outputs, "interpreted")["out"]
    assert out[4].isnan().all(), "a row beyond the step's rows was written"
    whole = written(lambda out: make(out, CONFIGS[0]), outputs, "interpreted")["out"]
    assert torch.equal(whole[:4], out[:4]), "depends on the tile"


def test_results_are_within_a_bound_of_float64() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-6, 1.5, 999), -torch.logspace(-6, 1.5, 999)])[None]
    d, out = x.double(), torch.zeros_like(x)
    run_interpreted(xielu(x, out, torch.tensor([1], dtype=torch.int32), 0, 1, **FACTORS))
    bent = torch.where(d > 0, 0.8 * d * d, 1.3 * (torch.expm1(d.clamp(max=0)) - d))
    assert ((out.double() - 0.5 * d - bent).abs() <= 2**-21 * (0.5 * d.abs() + bent.abs())).all()
