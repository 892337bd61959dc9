"""Linear layers of fp8: rounding, twin and float64, the same bits in any company, what the compiler makes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.backends.cuda.test_linear import ROWS, meta, sizes
from tests.support.cubin import compiled, faults
from tests.support.interpreter import run_interpreted
from tests.support.kernels import assert_close, assert_scratch_holds, assert_twin_agrees, poisoned, written
from torch import Tensor

from headrace.backends.cuda.kernels import linear as dense
from headrace.backends.cuda.kernels import linear_8bit as module
from headrace.backends.cuda.kernels.linear import Scratch, span_of
from headrace.backends.cuda.kernels.linear_8bit import KERNEL, linear_8bit, round_rows, suits
from headrace.backends.cuda.launch import Config, Launch

FP8 = torch.float8_e4m3fn


def inputs(num_in: int, num_rows: int = ROWS) -> Tensor:
    """Random rows, one of them of zeros, with NaN behind them."""
    x = torch.full((num_rows, num_in + 16), torch.nan, dtype=torch.bfloat16)
    x[:, :num_in] = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[1, :num_in] = 0
    return x[:, :num_in]


def rows_of(x: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
    """x rounded to fp8 by the twin, and its scales."""
    out = torch.zeros(x.shape, dtype=FP8)
    scales = torch.zeros(-(-x.shape[1] // 128) if grouped else 1, len(x) + 3)
    round_rows(x, out, scales, sizes(len(x)), 2, len(x), grouped=grouped).run_twin()
    return out, scales


def weights(num_out: int, num_in: int, grouped: bool, tall: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_in)
    w = torch.randn(num_out, num_in, generator=generator).to(FP8)
    scales = torch.rand(-(-num_out // tall), -(-num_in // 128) if grouped else 1, generator=generator) * 0.01 + 0.001
    return w, scales


def widened(numbers: Tensor, scales: Tensor, tall: int = 1) -> Tensor:
    """Numbers [N, K] times scales [N / tall, pieces], float64."""
    by_row = scales.double().repeat_interleave(tall, 0)[: numbers.shape[0]]
    return (
        numbers.double()
        * by_row.repeat_interleave(128 if scales.shape[1] > 1 else numbers.shape[1], 1)[:, : numbers.shape[1]]
    )


def scratch_for(weight: Tensor, num_rows: int, gated: bool, config: Config) -> Scratch:
    numbers, tiles = dense.scratch_numbers(weight, num_rows, config)
    return Scratch(torch.full((numbers,), torch.nan), torch.zeros(tiles, dtype=torch.int32))


@pytest.mark.parametrize("grouped", [False, True])
def test_rows_are_rounded_as_by_the_twin(grouped: bool) -> None:
    x = inputs(300)

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [round_rows(x, out["out"], out["scales"], sizes(ROWS - 2), 2, ROWS, grouped=grouped)]

    outputs = {"out": torch.full((ROWS, 300), 3.0).to(FP8), "scales": poisoned(3, ROWS, dtype=torch.float32)}
    expected, actual = written(make, outputs), written(make, outputs, "interpreted")
    assert torch.equal(actual["out"].float(), expected["out"].float())
    assert torch.equal(actual["scales"].nan_to_num(7.0), expected["scales"].nan_to_num(7.0))
    assert (actual["out"][ROWS - 2 :].float() == 3).all(), "a row beyond the step's rows was written"
    scales = actual["scales"][: 3 if grouped else 1, : ROWS - 2].t()
    error = (widened(actual["out"][: ROWS - 2], scales) - x[: ROWS - 2].double()).abs()
    # Half a unit of the last of e4m3's three digits.
    assert (error <= x[: ROWS - 2].double().abs() / 16 + scales.max() / 512).all()


@pytest.mark.parametrize(
    ("grouped", "tall", "gated", "num_in"),
    [(False, 1, False, 1200), (True, 128, True, 1104), (True, 1, False, 272), (False, 1, True, 96)],
)
def test_the_kernel_writes_what_its_twin_writes(grouped: bool, tall: int, gated: bool, num_in: int) -> None:
    x = inputs(num_in)
    rows, row_scales = rows_of(x, grouped)
    weight, scales = weights(140, num_in, grouped, tall)
    num_out = 140 // (1 + gated)
    bias = torch.randn(140, generator=torch.Generator().manual_seed(2))
    config = module.default(weight, ROWS, gated, grouped)
    shared = scratch_for(weight, ROWS, gated, config)

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [
            linear_8bit(
                rows, row_scales, weight, scales, out["out"], sizes(ROWS - 2), 2, ROWS, num_programs=2, scratch=shared,
                bias=bias, residual=x[:, :num_out] if not gated else None, gated=gated,
                activation="silu" if gated else None,
            )
        ]  # fmt: skip

    outputs = {"out": poisoned(ROWS, num_out, dtype=torch.bfloat16)}
    assert_twin_agrees(make, outputs)
    result = written(make, outputs, "interpreted")["out"]
    exact = widened(rows, row_scales[:, :ROWS].t()) @ widened(weight, scales, tall).t() + bias.double()
    if gated:
        exact = torch.nn.functional.silu(exact[:, :num_out]) * exact[:, num_out:]
    else:
        exact = exact + x[:, :num_out].double()
    assert_close(result[: ROWS - 2], exact[: ROWS - 2])
    assert result[ROWS - 2 :].isnan().all()


def test_a_step_longer_than_the_bucket_stays_within_the_scratch() -> None:
    rows, row_scales = rows_of(inputs(1104, 40), False)
    weight, scales = weights(40, 1104, False, 1)
    config, out = module.default(weight, 16, False, False), poisoned(40, 40, dtype=torch.float32)

    def make(scratch: Scratch) -> Launch:
        return linear_8bit(rows, row_scales, weight, scales, out, sizes(40), 2, 16, num_programs=3, scratch=scratch)

    assert_scratch_holds(make, dense.scratch_numbers(weight, 16, config))
    assert out[:16].isfinite().all()
    assert out[16:].isnan().all()


def broken_law(grouped: bool, mode: str, span_by_rows: bool = False) -> list[str]:
    """Where a row's bits are not those that it has among all. `span_by_rows` plants a split of K by rows."""
    num_in, num_out = 1200, 72
    rows, row_scales = rows_of(inputs(num_in, 18), grouped)
    weight, scales = weights(num_out, num_in, grouped, 1)
    assert span_of(num_out, num_in) < num_in, "K is not split"
    expected: Tensor | None = None
    actual = []
    for config in {str(config.tiles): config for config in KERNEL.configs}.values():
        for part, bucket in ((slice(0, 18), 18), (slice(7, 8), 1)):
            out = poisoned(part.stop - part.start, num_out, dtype=torch.float32)
            launch = linear_8bit(
                rows[part], row_scales[:, part], weight, scales, out, sizes(len(out)), 2, bucket, num_programs=2,
                scratch=scratch_for(weight, bucket, False, config), config=config,
            )  # fmt: skip
            if span_by_rows and bucket == 1 and not config.tiles["APART"]:
                launch = dataclasses.replace(launch, arguments={**launch.arguments, "SPAN": 2048, "SPANS": 1})
            if mode == "twin":
                launch.run_twin()
            else:
                run_interpreted(launch)
            expected = out if expected is None else expected
            if not torch.equal(out, expected[part]):
                actual.append(f"{config.name}: {part}")
    return actual


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_row_has_the_same_bits_in_any_company_bucket_and_configuration(grouped: bool, mode: str) -> None:
    assert broken_law(grouped, mode) == []


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_split_of_k_by_rows_is_found(mode: str) -> None:
    assert broken_law(False, mode, span_by_rows=True)


def launch_of(
    grouped: bool, config: Config | None, num_out: int = 4096, num_in: int = 4096,
    gated: bool = False, num_rows: int = 0,
) -> Launch:  # fmt: skip
    real, total = torch.float32, num_out * (1 + gated)
    num_rows = num_rows or (config or KERNEL.configs[0]).tiles["BR"]
    pieces = -(-num_in // 128) if grouped else 1
    return linear_8bit(
        meta(num_rows, num_in, dtype=FP8), meta(pieces, num_rows, dtype=real), meta(total, num_in, dtype=FP8),
        meta(-(-total // 128) if grouped else total, pieces, dtype=real), meta(num_rows, num_out),
        meta(4, dtype=torch.int32), 0, num_rows, num_programs=132, gated=gated,
        activation="silu" if gated else None, residual=None if gated else meta(num_rows, num_out), config=config,
        scratch=Scratch(meta(2**30, dtype=real), meta(2**20, dtype=torch.int32)),
    )  # fmt: skip


def launches() -> list[Launch]:
    """Llama-3.1-8B's gate and output projections in every configuration, and the rounding of rows."""
    some = []
    for config in KERNEL.configs:
        for grouped, num_out, gated in itertools.product((False, True), (4096, 14336), (False, True)):
            if gated == (num_out == 14336) and suits(config, meta(num_out * (1 + gated), 4096), gated, grouped):
                some.append(launch_of(grouped, config, num_out, gated=gated))
    for width in (4096, 14336):
        for grouped in (False, True):
            some.append(
                round_rows(
                    meta(8, width), meta(8, width, dtype=FP8), meta(width // 128, 8, dtype=torch.float32),
                    meta(4, dtype=torch.int32), 0, 8, grouped=grouped,
                )
            )  # fmt: skip
    return some


@pytest.mark.parametrize("num_rows", [1, 2048])
def test_the_compiled_kernel_uses_the_tensor_cores(num_rows: int) -> None:
    cubin = compiled(launch_of(False, None, num_rows=num_rows), 90)
    assert faults(cubin) == []
    body = [body for body in cubin.loops() if any("GMMA" in name for name in body)][-1]
    assert any(name.startswith("QGMMA") for name in body)
    # Sums leave the tensor cores after 128 inputs: they are added to float32 in the loop.
    assert any(name.startswith("FADD") for name in body)
    assert not any(name.startswith("LDG.") for name in body)


def test_fp8_tiles_that_would_be_widened_to_float16_are_found() -> None:
    config = KERNEL.configs[0]
    weight = meta(28672, 4096, dtype=FP8)
    assert not suits(config, weight, True, False)
    cubin = compiled(launch_of(False, config, 14336, gated=True), 90)
    assert cubin.count("HMMA")
    assert not cubin.count("QGMMA")
