"""Linear layers: against the twin and float64, the same bits for a row in any company, and what the compiler makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.support.cubin import compiled, faults
from tests.support.interpreter import run_interpreted
from tests.support.kernels import (
    DTYPES,
    assert_close,
    assert_scratch_holds,
    assert_twin_agrees,
    backwards,
    poisoned,
    written,
)
from torch import Tensor

from headrace.backends.cuda.kernels import linear as module
from headrace.backends.cuda.kernels.linear import KERNEL, Scratch, linear, scratch_numbers, span_of, suits
from headrace.backends.cuda.launch import Config, Kernel, Launch
from headrace.backends.torch_ref.ops import ACTIVATIONS

ROWS = 9
"""Rows of the step; buffers have room for more."""


def sizes(num_rows: int) -> Tensor:
    return torch.tensor([0, 0, num_rows, 0], dtype=torch.int32)


def problem(dtype: torch.dtype, num_in: int, num_out: int, gated: bool, num_rows: int = ROWS) -> dict[str, Tensor]:
    """Random operands. Behind the inputs of each row of x lie NaN."""
    generator = torch.Generator().manual_seed(num_in + num_out)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = torch.full((num_rows, num_in + 16), torch.nan, dtype=dtype)
    x[:, :num_in] = random(num_rows, num_in).to(dtype)
    weight = (random(num_out * (1 + gated), num_in) / num_in**0.5).to(dtype)
    return {
        "x": x[:, :num_in],
        "weight": weight,
        "bias": random(weight.shape[0]),
        "residual": random(num_rows, num_out).to(dtype),
    }


def scratch_for(weight: Tensor, num_rows: int, gated: bool, config: Config) -> Scratch:
    numbers, tiles = scratch_numbers(weight, num_rows, config)
    return Scratch(torch.full((numbers,), torch.nan), torch.zeros(tiles, dtype=torch.int32))


CASES: list[dict[str, Any]] = [
    {"num_in": 1536, "num_out": 70, "bias": True, "residual": True},
    {"num_in": 1100, "num_out": 48, "gated": True, "kind": "silu"},
    {"num_in": 300, "num_out": 80, "gated": True, "kind": "gelu", "bias": True},
    {"num_in": 576, "num_out": 40, "kind": "gelu_tanh", "wide": True},
    {"num_in": 64, "num_out": 16, "kind": "relu", "residual": True},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_writes_what_its_twin_writes(dtype: torch.dtype, case: dict[str, Any]) -> None:
    gated, kind = case.get("gated", False), case.get("kind")
    inputs = problem(dtype, case["num_in"], case["num_out"], gated)
    chosen = {name: inputs[name] for name in ("bias", "residual") if case.get(name)}
    config = module.default(inputs["weight"], 12, gated)

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [
            linear(
                inputs["x"], inputs["weight"], out["out"], sizes(ROWS - 2), 2, ROWS, num_programs=3,
                scratch=Scratch(out["partial"], out["arrived"]), activation=kind, gated=gated, **chosen,
            )
        ]  # fmt: skip

    scratch = scratch_for(inputs["weight"], ROWS, gated, config)
    out = poisoned(ROWS, case["num_out"], dtype=torch.float32 if case.get("wide") else dtype)
    outputs = {"out": out, "arrived": scratch.arrived}
    shared = {"partial": scratch.partial}
    assert_twin_agrees(lambda copies: make({**copies, **shared}), outputs, 1e-4 if case.get("wide") else None)
    result = written(lambda copies: make({**copies, **shared}), outputs, "interpreted")["out"]
    assert result[ROWS - 2 :].isnan().all(), "a row beyond the step's rows was written"
    exact = inputs["x"].double() @ inputs["weight"].double().t()
    if "bias" in chosen:
        exact += inputs["bias"].double()
    first, second = exact[:, : case["num_out"]], exact[:, case["num_out"] :]
    exact = ACTIVATIONS[kind](first) if kind else first
    if gated:
        exact = exact * second
    if "residual" in chosen:
        exact = exact + inputs["residual"].double()
    assert_close(result[: ROWS - 2], exact[: ROWS - 2], 1e-4 if case.get("wide") else None)


def bits(
    inputs: Mapping[str, Tensor], rows: slice, config: Config, mode: str, bucket: int, gated: bool, span: int = 0
) -> Tensor:
    """Rows of the result under `config` in a bucket of so many rows; `span` replaces the matrix's own.

    They are float32, so that no rounding hides a difference.
    """
    x = inputs["x"][rows]
    num_out = inputs["weight"].shape[0] // (1 + gated)

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        launch = linear(
            x, inputs["weight"], out["out"], sizes(len(x)), 2, bucket, num_programs=2,
            scratch=scratch_for(inputs["weight"], bucket, gated, config), residual=inputs["residual"][rows],
            bias=inputs["bias"], activation="silu" if gated else None, gated=gated, config=config,
        )  # fmt: skip
        if span:
            spans = -(-x.shape[1] // span)
            launch = dataclasses.replace(launch, arguments={**launch.arguments, "SPAN": span, "SPANS": spans})
        return [launch]

    return written(make, {"out": poisoned(len(x), num_out, dtype=torch.float32)}, mode)["out"]


def broken_law(inputs: Mapping[str, Tensor], mode: str, gated: bool, by_rows: bool = False) -> list[str]:
    """Where a row's bits are not those that it has among all, over all configurations. `by_rows` plants a split of K
    that follows the number of rows."""
    expected = bits(inputs, slice(None), KERNEL.configs[0], mode, 24, gated)
    tiles = {str(config.tiles): config for config in KERNEL.configs if suits(config, inputs["weight"])}
    actual = []
    configs = [*tiles.values()]
    for config in configs if mode == "interpreted" else (configs[0], configs[-1]):
        for rows, bucket in ((slice(None), 20), (slice(7, 8), 1), (slice(2, 8), 16)):
            span = 2048 if by_rows and bucket > 16 and not config.tiles["APART"] else 0
            if not torch.equal(bits(inputs, rows, config, mode, bucket, gated, span), expected[rows]):
                actual.append(f"{config.name}: rows {rows} of {bucket}")
    return actual


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_any_company_bucket_and_configuration(gated: bool) -> None:
    inputs = problem(torch.bfloat16, 1100, 70 - 30 * gated, gated, num_rows=20)
    assert span_of(*inputs["weight"].shape) < 1100, "K is not split"
    assert broken_law(inputs, "interpreted", gated) == []
    assert broken_law(inputs, "twin", gated) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_split_of_k_by_rows_is_found(mode: str) -> None:
    assert broken_law(problem(torch.bfloat16, 1100, 70, False, num_rows=20), mode, False, by_rows=True)


def test_sums_are_added_in_order_whoever_arrives_last() -> None:
    inputs = problem(torch.float32, 1536, 40, False)
    config = module.default(inputs["weight"], ROWS)
    results = []
    for order in (None, backwards, lambda num_programs: [4, 1, 5, 0, 3, 2]):
        scratch = scratch_for(inputs["weight"], ROWS, False, config)
        out = poisoned(ROWS, 40, dtype=torch.float32)
        launch = linear(
            inputs["x"], inputs["weight"], out, sizes(ROWS), 2, ROWS, num_programs=64, scratch=scratch, config=config
        )
        assert launch.grid[0] == 6
        for _ in range(2):  # as in a replayed graph: the counters are 0 again
            run_interpreted(launch, order)
        assert not scratch.arrived.any()
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_step_longer_than_the_bucket_stays_within_the_scratch() -> None:
    inputs = problem(torch.bfloat16, 1100, 40, False, num_rows=40)
    config = module.default(inputs["weight"], 16)
    out = poisoned(40, 40, dtype=torch.float32)

    def make(scratch: Scratch) -> Launch:
        return linear(
            inputs["x"], inputs["weight"], out, sizes(40), 2, 16, num_programs=3, scratch=scratch, config=config
        )

    assert_scratch_holds(make, scratch_numbers(inputs["weight"], 16, config))
    assert out[:16].isfinite().all()
    assert out[16:].isnan().all()
    again = poisoned(40, 40, dtype=torch.float32)
    launch = linear(inputs["x"], inputs["weight"], again, sizes(40), 2, 16, num_programs=3, config=config,
                    scratch=scratch_for(inputs["weight"], 16, False, config))  # fmt: skip
    launch.run_twin()
    assert again[16:].isnan().all()


def test_scratch_that_is_too_small_is_refused() -> None:
    inputs = problem(torch.bfloat16, 1536, 40, False)
    with pytest.raises(ValueError, match="scratch"):
        linear(inputs["x"], inputs["weight"], inputs["residual"], sizes(ROWS), 2, ROWS, num_programs=2)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_of(
    num_out: int, num_in: int, config: Config | None, num_rows: int = 0, gated: bool = False,
    dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None, bias: bool = False,
) -> Launch:  # fmt: skip
    weight = meta(num_out * (1 + gated), num_in, dtype=dtype)
    num_rows = num_rows or (config or KERNEL.configs[0]).tiles["BR"]
    config = config or module.default(weight, num_rows, gated)
    numbers, tiles = scratch_numbers(weight, num_rows, config)
    scratch = Scratch(meta(numbers, dtype=torch.float32), meta(tiles, dtype=torch.int32))
    return linear(
        meta(num_rows, num_in, dtype=dtype), weight, meta(num_rows, num_out, dtype=out_dtype or dtype),
        meta(4, dtype=torch.int32), 0, num_rows, num_programs=132, scratch=scratch, gated=gated,
        bias=meta(num_out, dtype=torch.float32) if bias else None,
        activation="silu" if gated else None, residual=None if gated else meta(num_rows, num_out, dtype=dtype),
        config=config,
    )  # fmt: skip


def launches() -> list[Launch]:
    """Llama-3.1-8B's gate and output projections in every configuration, and some of its other matrices."""
    some = [
        launch_of(num_out, num_in, config, gated=gated)
        for config in KERNEL.configs
        for num_out, num_in, gated in ((4096, 4096, False), (14336, 4096, True))
        if suits(config, meta(num_out * (1 + gated), num_in))
    ]
    for num_rows in (1, 2048):
        some.append(launch_of(128256, 4096, None, num_rows, out_dtype=torch.float32))
        some.append(launch_of(4096, 14336, None, num_rows, dtype=torch.float16))
        some.append(launch_of(960, 576, None, num_rows, bias=True))
        some.append(launch_of(1536, 576, None, num_rows, gated=True, dtype=torch.float32))
    return some


def sixteen_bit_loads_in_loops(launch: Launch, capability: int) -> int:
    """Loads of 16 bits in the innermost of the kernel's loops over K."""
    loops = [body for body in compiled(launch, capability).loops() if any("MMA" in name for name in body)]
    return sum(name.startswith(("LDG.E.U16", "LDS.U16")) for name in loops[-1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_rows", [1, 2048])
def test_the_compiled_kernel_uses_the_tensor_cores_and_wide_loads(num_rows: int) -> None:
    launch = launch_of(14336, 4096, None, num_rows, gated=True)
    cubin = compiled(launch, 90)
    assert faults(cubin) == []
    assert cubin.count("HGMMA")
    assert cubin.count("HMMA") == 0
    assert cubin.count("LDGSTS") == cubin.count("LDGSTS.E.BYPASS.128")
    assert sixteen_bit_loads_in_loops(launch, 90) == 0


def test_a_configuration_that_spills_is_found() -> None:
    tiles = {"BR": 128, "BN": 256, "BK": 64, "SWAP": 0, "APART": 0, "BAND": 8}
    assert not suits(Config(tiles, 4, 3), meta(4096, 4096))
    assert any("stack" in fault for fault in faults(compiled(launch_of(4096, 4096, Config(tiles, 4, 3)), 90)))


def test_a_configuration_with_too_much_shared_memory_is_found() -> None:
    config = dataclasses.replace(KERNEL.configs[0], num_stages=20)
    assert any("shared memory" in fault for fault in faults(compiled(launch_of(4096, 4096, config), 90)))


@triton.jit
def _adds_bfloat16(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + tl.load(out + i))


def test_arithmetic_on_bfloat16_is_found() -> None:
    launch = Launch(Kernel(_adds_bfloat16, print), (1,), {"x": meta(64), "out": meta(64), "N": 64}, Config())
    assert any("bfloat16" in fault for fault in faults(compiled(launch, 90)))
