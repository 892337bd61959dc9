"""The warp-specialised linear layers: what they refuse, which configuration is taken, what the compiler makes of them.

No interpreter runs Gluon. That the compiled kernel has the sums and the epilogue of `linear` is read from its
instructions here; its bits are compared on a GPU, by `trust` and by `bench.gpu prove`.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import pytest
import torch
from tests.backends.cuda import test_linear
from tests.backends.cuda.test_linear import meta, sizes
from tests.support.cubin import Cubin, compiled, faults
from tests.support.kernels import poisoned
from torch import Tensor

from headrace.backends.cuda.kernels import linear, linear_8bit
from headrace.backends.cuda.kernels.linear_ws import KERNEL, can_load, default, is_config, linear_ws, suits
from headrace.backends.cuda.launch import Config, Launch

FP8 = torch.float8_e4m3fn
LARGE, WIDE, SMALL = KERNEL.configs


def launch_of(
    num_out: int, num_in: int, config: Config | None, gated: bool = False, dtype: torch.dtype = torch.bfloat16,
    num_rows: int = 2048, activation: Any = None, out_dtype: torch.dtype = torch.bfloat16, extras: bool = False,
) -> Launch:  # fmt: skip
    """extras: with bias, and a residual where gated too."""
    outputs, real = num_out * (1 + gated), torch.float32
    scales = {"x_scales": meta(1, num_rows, dtype=real), "w_scales": meta(outputs, 1, dtype=real)}
    return linear_ws(
        meta(num_rows, num_in, dtype=dtype), meta(outputs, num_in, dtype=dtype),
        meta(num_rows, num_out, dtype=out_dtype), meta(4, dtype=torch.int32), 0, num_rows, num_programs=132,
        gated=gated, activation=activation or ("silu" if gated else None), config=config,
        bias=meta(outputs, dtype=real) if extras else None,
        residual=None if gated and not extras else meta(num_rows, num_out), **(scales if dtype == FP8 else {}),
    )  # fmt: skip


def launches() -> list[Launch]:
    """Llama-3.1-8B's matrices in every configuration that suits them, of 16 and of 8 bits."""
    some = [
        launch_of(num_out, num_in, config, gated, dtype)
        for dtype in (torch.bfloat16, FP8)
        for config in KERNEL.configs
        for num_out, num_in, gated in ((4096, 4096, False), (14336, 4096, True))
        if suits(config, meta(num_out * (1 + gated), num_in, dtype=dtype), gated)
    ]
    some.append(launch_of(128256, 4096, None, out_dtype=torch.float32))
    return [*some, launch_of(1536, 1536, None, True, activation="gelu", extras=True)]


@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "gated", "config"),
    [
        (64, 28672, 4096, True, None),
        (65, 28672, 4096, True, WIDE),
        (8192, 28672, 4096, True, WIDE),
        (65, 128256, 4096, False, LARGE),
        (128, 4096, 4096, False, None),
        (129, 4096, 4096, False, LARGE),
        (2048, 4096, 14336, False, LARGE),
        (2048, 3072, 1536, True, LARGE),
    ],
)
def test_the_configuration_follows_rows_and_spans(
    num_rows: int, num_out: int, num_in: int, gated: bool, config: Config | None
) -> None:
    assert default(meta(num_out, num_in), num_rows, gated) is config


def test_a_part_of_a_matrix_has_the_spans_of_the_whole() -> None:
    part = meta(2048, 4096)
    assert not suits(WIDE, part, True)
    assert suits(WIDE, part, True, num_whole=28672)
    assert default(part, 100, True, 28672) is WIDE
    assert default(part, 100, True) is None


def test_fp8_has_no_room_for_wide_tiles() -> None:
    assert default(meta(28672, 4096, dtype=FP8), 2048, True) is LARGE
    assert not suits(WIDE, meta(28672, 4096, dtype=FP8), True)
    assert not suits(WIDE, meta(4096, 4096), True), "nor have spans"


def test_names_differ_from_those_of_the_kernels_it_stands_for() -> None:
    others = [*linear.KERNEL.configs, *linear_8bit.KERNEL.configs]
    assert {config.name for config in KERNEL.configs}.isdisjoint(config.name for config in others)
    assert all(is_config(config) for config in KERNEL.configs)
    assert not any(is_config(config) for config in others)


def test_rows_that_begin_within_16_bytes_are_refused() -> None:
    whole = torch.zeros(4, 1104, dtype=torch.bfloat16)
    assert can_load(whole, whole[:, 8:])
    assert can_load(whole[:, :1100])
    wrong = [whole[:, 4:], whole[:, ::2], torch.zeros(4, 1100, dtype=torch.bfloat16), whole.float(), whole[:0]]
    assert not any(map(can_load, wrong))
    assert not can_load(whole, wrong[0])
    with pytest.raises(ValueError, match="16 bytes"):
        linear_ws(whole, wrong[2], whole, sizes(4), 2, 4, num_programs=1)


@pytest.mark.parametrize("gated", [False, True])
def test_the_twin_is_that_of_linear(gated: bool) -> None:
    inputs = test_linear.problem(torch.bfloat16, 1104, 40, gated)
    outs = []
    options: dict[str, Any] = {"bias": inputs["bias"], "residual": inputs["residual"], "gated": gated}
    options |= {"activation": "gelu" if gated else None, "num_programs": 2}
    for make in (linear.linear, linear_ws):
        config = next(c for c in linear.KERNEL.configs if not c.tiles["APART"]) if make is linear.linear else LARGE
        out = poisoned(9, 40, dtype=torch.float32)
        # Of a step longer than the bucket too no row beyond it is written.
        make(inputs["x"], inputs["weight"], out, sizes(20), 2, 7, config=config, **options).run_twin()
        outs.append(out)
    assert torch.equal(outs[0][:7], outs[1][:7])
    assert outs[1][7:].isnan().all()


def test_the_twin_of_fp8_is_that_of_linear_8bit() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 640, generator=generator).to(FP8) for rows in (5, 40))
    x_scales, w_scales = torch.rand(1, 5, generator=generator), torch.rand(40, 1, generator=generator)
    outs = [poisoned(6, 40, dtype=torch.float32) for _ in range(2)]
    rest: list[Any] = [sizes(5), 2, 5]
    linear_8bit.linear_8bit(x, x_scales, weight, w_scales, outs[0], *rest, num_programs=1).run_twin()
    scales: dict[str, Tensor] = {"x_scales": x_scales, "w_scales": w_scales}
    linear_ws(x, weight, outs[1], *rest, num_programs=1, **scales).run_twin()
    assert torch.equal(outs[0][:5], outs[1][:5])
    assert outs[1][5:].isnan().all()


def arithmetic(cubin: Cubin) -> collections.Counter[str]:
    """Operations on float32 and instructions of the tensor cores in the kernel's text."""
    names = re.findall(r"\b((?:add|sub|mul|fma|div|ex2|abs|neg|setp|selp|cvt|wgmma.mma)[a-z_.0-9]*)\b", cubin.ptx)
    return collections.Counter(name for name in names if ".f32" in name)


def test_the_epilogue_has_the_operations_of_linear() -> None:
    mine = launch_of(14336, 4096, SMALL, True, activation="gelu", extras=True)
    values = mine.arguments
    usual = next(c for c in linear.KERNEL.configs if c.name.startswith("BR=64 BN=128 BK=64 SWAP=0"))
    theirs = linear.linear(
        meta(2048, 4096), meta(28672, 4096), values["out"], values["sizes"], 0, 2048, num_programs=132,  # type: ignore[arg-type]
        bias=values["bias"], residual=values["residual"], activation="gelu", gated=True, config=usual,  # type: ignore[arg-type]
    )  # fmt: skip
    expected = arithmetic(compiled(theirs, 90))
    assert expected
    assert arithmetic(compiled(mine, 90)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_the_compiled_kernel_loads_by_tma_and_multiplies_by_wgmma(dtype: torch.dtype) -> None:
    cubin = compiled(launch_of(4096, 4096, LARGE, dtype=dtype), 90)
    assert faults(cubin) == []
    assert cubin.count("UTMALDG")
    assert cubin.count("HGMMA" if dtype == torch.bfloat16 else "QGMMA")
    assert not any(cubin.count(name) for name in ("HMMA", "LDGSTS"))
    if dtype == FP8:
        # Sums leave the tensor cores after 128 inputs: they are added to float32 in the loop.
        body = [body for body in cubin.loops() if any(name.startswith("QGMMA") for name in body)][-1]
        assert any(name.startswith("FADD") for name in body)
