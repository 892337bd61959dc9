"""Mixture of experts: against the twins and the reference, and the same bits for a row in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.support.interpreter import run_interpreted
from tests.support.kernels import DTYPES, assert_close, assert_twin_agrees, backwards, poisoned, written
from torch import Tensor

from headrace.backends.base import ExpertLayer, Routing
from headrace.backends.cuda.kernels import experts as module
from headrace.backends.cuda.kernels.experts import GROUPED, Mixture, Scratch, Stack, experts, make_scratch
from headrace.backends.cuda.kernels.grouping import GROUP
from headrace.backends.cuda.launch import Config, Kernel, Launch
from headrace.backends.torch_ref.ops import RefMatrix, RefOps
from headrace.backends.torch_ref.rowwise import padded

HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 48, 40, 5, 2, 9
SMALL = Config({"BR": 16, "BN": 32, "BK": 16, "SWAP": 1}, 4, 2)
WIDE = Config({"BR": 32, "BN": 64, "BK": 16, "SWAP": 0}, 4, 2)


def launches_of(
    hidden: int, inner: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None, num_rows: int = 256, device: str = "meta",
) -> list[Launch]:  # fmt: skip
    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    x, logits, sizes = empty(num_rows, hidden), empty(num_rows, num_experts), empty(4, dtype=torch.int32)
    gate_up, down = empty(num_experts, 2 * inner, hidden), empty(num_experts, hidden, inner)
    mixture = Mixture(Routing(top_k), Stack(gate_up, num_experts), Stack(down, num_experts), "silu")
    return experts(
        x, logits, mixture, x, make_scratch(num_rows, mixture, dtype), sizes, 0, num_rows, num_programs=264,
        config=config,
    )  # fmt: skip


def launches(device: str = "meta") -> list[Launch]:
    """The products of Mixtral-8x7B in every configuration, and all kernels for many small experts."""
    products = [
        launch
        for config in GROUPED.configs
        for launch in launches_of(4096, 14336, 8, 2, config=config, device=device)
        if launch.kernel is GROUPED
    ]
    return [
        *products,
        *launches_of(2048, 768, 128, 8, device=device),
        *launches_of(576, 1008, 6, 3, torch.float16, device=device),
        *launches_of(64, 128, 4, 2, torch.float32, device=device),
    ]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sizes(num_rows: int) -> Tensor:
    return torch.tensor([0, 0, num_rows, 0], dtype=torch.int32)


class Problem:
    """Random weights and rows. Behind the numbers of a row of x lie NaN; rows 0 and 1 have equal and -inf logits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.x = torch.full((ROWS, HIDDEN + 16), torch.nan, dtype=dtype)[:, :HIDDEN]
        self.x.copy_(random(ROWS, HIDDEN, seed=1))
        self.logits = random(ROWS, EXPERTS, seed=2, dtype=dtype)
        self.logits[0] = torch.tensor([1.0, -0.0, 0.0, 0.0, -2.0])
        self.logits[1] = torch.tensor([-torch.inf, -torch.inf, 3.0, -torch.inf, -torch.inf])
        self.gate_up = random(EXPERTS, 2 * INNER, HIDDEN, seed=3).to(dtype) / 4
        self.down = random(EXPERTS, HIDDEN, INNER, seed=4).to(dtype) / 4

    @property
    def mixture(self) -> Mixture:
        return Mixture(Routing(TOP_K), Stack(self.gate_up, EXPERTS), Stack(self.down, EXPERTS), "silu")

    def outputs(self, num_rows: int = ROWS) -> dict[str, Tensor]:
        scratch = make_scratch(num_rows, self.mixture, self.dtype)
        used = {name: poisoned(*t.shape, dtype=t.dtype) for name, t in scratch._asdict().items() if t.numel()}
        return {**used, "out": poisoned(num_rows, HIDDEN, dtype=self.dtype)}

    def make(
        self,
        out: Mapping[str, Tensor],
        rows: Sequence[int] = range(ROWS - 1),
        config: Config | None = SMALL,
        num_programs: int = 3,
    ) -> list[Launch]:
        scratch = Scratch(*(out.get(name, torch.empty(0)) for name in Scratch._fields))
        bucket = len(out["out"])
        x = torch.full((bucket, HIDDEN), torch.nan, dtype=self.dtype)
        logits = torch.full((bucket, EXPERTS), torch.nan, dtype=self.dtype)
        x[: len(rows)], logits[: len(rows)] = self.x[list(rows)], self.logits[list(rows)]
        return experts(
            x, logits, self.mixture, out["out"], scratch, sizes(len(rows)), 2, bucket, num_programs=num_programs,
            config=config,
        )  # fmt: skip

    def reference(self) -> Tensor:
        """The reference's operator on the same weights, in float32; its router has the logits."""

        def matrix(weight: Tensor) -> RefMatrix:
            data = torch.zeros(padded(weight.shape[1]), padded(weight.shape[0]))
            data[: weight.shape[1], : weight.shape[0]] = weight.float().t()
            return RefMatrix(data, None, weight.shape[1], weight.shape[0])

        ops = RefOps(torch.device("cpu"), torch.float32)
        weights, ids = ops.route(self.logits, Routing(TOP_K))
        ops.route = lambda *_: (weights, ids)  # type: ignore[method-assign]
        gate_up, down = ([matrix(w) for w in stack] for stack in (self.gate_up, self.down))
        return ops.experts(self.x.float(), ExpertLayer(matrix(self.gate_up[0]), Routing(TOP_K), gate_up, down, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_write_what_their_twins_write(dtype: torch.dtype) -> None:
    problem = Problem(dtype)
    config = None if dtype == torch.float32 else SMALL
    assert_twin_agrees(lambda out: problem.make(out, config=config), problem.outputs())


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_results_are_those_of_the_reference(dtype: torch.dtype, mode: str) -> None:
    problem = Problem(dtype)
    out = written(problem.make, problem.outputs(), mode)
    assert out["out"][ROWS - 1].isnan().all(), "a row beyond the step's rows was written"
    expected = problem.reference()
    assert_close(out["out"][: ROWS - 1], expected[: ROWS - 1])
    # Equal logits go to the lower id, also where one is -0, and where all the others are -inf.
    assert out["ids"][:2].tolist() == [[0, 1], [0, 2]]
    assert out["weights"][1].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_pairs_are_sorted_by_expert_and_then_by_row(mode: str) -> None:
    ids = torch.randint(0, 11, (300, 3), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    ids[250:] = 2**31 - 1
    outputs = {"order": poisoned(900, dtype=torch.int32), "offsets": poisoned(12 + 1, dtype=torch.int32)}

    def make(out: Mapping[str, Tensor]) -> list[Launch]:
        inputs = {"ids": ids, "order": out["order"], "offsets": out["offsets"], "sizes": sizes(250)}
        return [Launch(GROUP, (12,), {**inputs, "TOP_K": 3, "DIM": 2}, Config({"PAIRS": 256}, 4))]

    out = written(make, outputs, mode, backwards)
    flat = ids[:250].flatten()
    assert torch.equal(out["order"][:750], flat.sort(stable=True).indices.int())
    assert out["offsets"].tolist() == [int((flat < expert).sum()) for expert in range(13)]
    assert (out["order"][750:] == 2**31 - 1).all()


def companies(problem: Problem, mode: str, make: Callable[..., list[Launch]] | None = None) -> list[Tensor]:
    """Row 4 of a step: among others, in another place and bucket, alone, and with tiles of another size."""
    make = make or problem.make
    cases: list[tuple[list[int], int, Config]] = [
        (list(range(ROWS)), ROWS, SMALL),
        ([8, 2, 3, 7, 0, 1, 4], 12, SMALL),
        ([4], 1, SMALL),
        ([5, 4, 6], 8, WIDE),
    ]
    results = []
    for rows, bucket, config in cases:
        out = written(lambda out, r=rows, c=config: make(out, r, c), problem.outputs(bucket), mode)
        results.append(out["out"][rows.index(4)])
    return results


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_row_has_the_same_bits_in_any_company(mode: str, dtype: torch.dtype) -> None:
    first, *others = companies(Problem(dtype), mode)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_nothing_is_read_behind_the_weights_and_rows() -> None:
    """Weights with NaN behind them, and rows of `inner` that no pair wrote, do not reach the results."""
    problem = Problem(torch.bfloat16)
    expected = written(problem.make, problem.outputs(), "interpreted")["out"]
    for name in ("gate_up", "down"):
        weight = getattr(problem, name)
        memory = torch.full((weight.numel() + 4096,), torch.nan, dtype=weight.dtype)
        memory[: weight.numel()] = weight.flatten()
        setattr(problem, name, memory[: weight.numel()].view(weight.shape))
    assert torch.equal(written(problem.make, problem.outputs(), "interpreted")["out"][:8], expected[:8])


def test_the_grid_need_not_cover_the_tiles() -> None:
    problem = Problem(torch.bfloat16)
    results = [
        written(lambda out, n=n: problem.make(out, num_programs=n), problem.outputs(), "interpreted", backwards)["out"]
        for n in (1, 50)
    ]
    assert torch.equal(results[0][:8], results[1][:8])


@triton.jit
def _split_by_rows(
    x, ld_x, weight, bias, out, ld_out, order, offsets, K, N,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """A broken down product: K is split in two where an expert has more than one row."""
    expert = tl.program_id(0)
    first = tl.load(offsets + expert)
    last = tl.load(offsets + expert + 1)
    k = tl.arange(0, 64)[None, :]
    n = tl.arange(0, 64)[:, None]
    half = tl.where(last - first > 1, K // 2, K)
    b = tl.load(weight + (expert * N + n) * K + k, mask=(k < K) & (n < N), other=0.0)
    for place in range(first, last):
        pair = tl.load(order + place)
        v = b * tl.load(x + place * ld_x + k, mask=k < K, other=0.0)
        v = tl.sum(tl.where(k < half, v, 0.0), 1) + tl.sum(tl.where(k >= half, v, 0.0), 1)
        tl.store(out + pair * ld_out + tl.arange(0, 64), v, mask=tl.arange(0, 64) < N)


def test_a_split_that_depends_on_the_company_is_seen() -> None:
    """The negative control of the law: a sum over K cut by the number of an expert's rows fails the check."""
    problem = Problem(torch.float32)
    broken = Kernel(_split_by_rows, GROUPED.twin)

    def make(out: Mapping[str, Tensor], rows: Sequence[int], config: Config) -> list[Launch]:
        result: list[Any] = problem.make(out, rows, config)
        result[3] = dataclasses.replace(result[3], kernel=broken, grid=(EXPERTS,))
        return result

    first, *others = companies(problem, "interpreted", make)
    assert not all(torch.equal(first, other) for other in others)
    assert_close(others[1], first, 1e-5)


def test_results_added_in_another_order_are_seen() -> None:
    """The negative control of ascending ids: with three experts a row, the order of the sum shows in the bits."""
    y, weights = random(24, 64, seed=7), random(8, 3, seed=8).abs()
    results = []
    for order in ([0, 1, 2], [1, 2, 0]):
        out = poisoned(8, 64, dtype=torch.float32)
        turned = y.view(8, 3, 64)[:, order].reshape(24, 64).contiguous()
        arguments = {"y": turned, "ld_y": 64, "weights": weights[:, order].contiguous(), "out": out, "ld_out": 64,
                     "sizes": sizes(8), "width": 64, "TOP_K": 3, "DIM": 2}  # fmt: skip
        run_interpreted(Launch(module.COMBINE, (8, 1), arguments, Config({"COLUMNS": 64}, 2)))
        results.append(out)
    assert_close(results[0], results[1])
    assert not torch.equal(results[0], results[1])
