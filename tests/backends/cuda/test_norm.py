"""The norm kernel: against its twin, against float64, and the same bits for a row in any company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.support.kernels import DTYPES, assert_close, assert_twin_agrees, poisoned, written
from torch import Tensor

from headrace.backends.cuda.kernels.norm import norm
from headrace.backends.cuda.launch import Launch


def problem(dtype: torch.dtype, width: int, num_rows: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(width)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": random(num_rows, width + 12)[:, :width],
        "add": random(num_rows, width),
        "weight": random(width),
        "bias": random(width),
    }


def sizes(num_rows: int) -> Tensor:
    return torch.tensor([num_rows, 0, 0, 0], dtype=torch.int32)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [64, 100, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_writes_what_its_twin_writes(dtype: torch.dtype, width: int, centred: bool) -> None:
    inputs = problem(dtype, width)
    bias = inputs["bias"] if centred else None

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [
            norm(
                inputs["x"], inputs["weight"], out["out"], sizes(4), 0, 8, eps=1e-5, offset=1.0, bias=bias,
                centred=centred, add=inputs["add"], total=out["total"],
            )
        ]  # fmt: skip

    outputs = {name: poisoned(5, width, dtype=dtype) for name in ("out", "total")}
    assert_twin_agrees(make, outputs)
    results = written(make, outputs, "interpreted")
    assert results["out"][4].isnan().all(), "a row beyond the step's rows was written"
    total = (inputs["x"] + inputs["add"])[:4].double()
    middle = total - total.mean(-1, keepdim=True) if centred else total
    exact = middle / (middle.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (inputs["weight"].double() + 1)
    assert_close(results["out"][:4], exact if bias is None else exact + bias.double())


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_row_has_the_same_bits_alone_and_among_others(mode: str) -> None:
    inputs = problem(torch.bfloat16, 576)

    def run(first: int, last: int) -> Tensor:
        def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
            return [norm(inputs["x"][first:last], inputs["weight"], out["out"], sizes(last - first), 0, 8, eps=1e-5)]

        return written(make, {"out": poisoned(last - first, 576, dtype=torch.bfloat16)}, mode)["out"]

    together = run(0, 5)
    for row in range(5):
        assert torch.equal(run(row, row + 1)[0], together[row])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_sum_is_rounded_before_its_norm_and_a_norm_once(mode: str) -> None:
    inputs = problem(torch.bfloat16, 576)

    def both(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        add, total = inputs["add"], out["total"]
        first = norm(inputs["x"], inputs["weight"], out["out"], sizes(5), 0, 8, eps=1e-5, add=add, total=total)
        return [first, norm(total, inputs["weight"], out["again"], sizes(5), 0, 8, eps=1e-5)]

    outputs = {name: poisoned(5, 576, dtype=torch.bfloat16) for name in ("out", "total", "again")}
    results = written(both, outputs, mode)
    assert torch.equal(results["out"], results["again"])
    total = results["total"].double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * inputs["weight"].double()
    unit = torch.exp2(exact.abs().log2().floor() - 7)
    assert ((results["out"].double() - exact).abs() <= 0.51 * unit).all()


@pytest.mark.parametrize("by_number", [None, False, True], ids=["no weight", "one weight", "weights"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_a_row_are_normed_each_by_itself_and_in_place(dtype: torch.dtype, by_number: bool | None) -> None:
    """Three pieces of 20 numbers, columns of a wider row; a piece has the bits that it has in a row of its own."""
    inputs, heads, width = problem(dtype, 100), 3, 20
    weight = None if by_number is None else inputs["weight"][: heads * width if by_number else width]

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        part = out["x"][:, 30:90]
        return [norm(part, weight, part, sizes(4), 0, 8, eps=1e-5, offset=1.0, heads=heads)]

    outputs = {"x": inputs["x"].clone()}
    assert_twin_agrees(make, outputs)
    results = written(make, outputs, "interpreted")["x"]
    pieces = inputs["x"][:4, 30:90].double().view(4, heads, width)
    exact = pieces / (pieces.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if weight is not None:
        exact = exact * (weight.double().view(-1, width) + 1)
    assert_close(results[:4, 30:90], exact.flatten(1))
    changed = torch.zeros_like(results, dtype=torch.bool)
    changed[:4, 30:90] = True
    assert torch.equal(results[~changed], inputs["x"][~changed]), "other columns or rows were written"
    sizes_of_one, outputs = sizes(1), {"x": inputs["x"][2:3].clone()}

    def alone(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        part = out["x"][:, 30:90]
        return [norm(part, weight, part, sizes_of_one, 0, 1, eps=1e-5, offset=1.0, heads=heads)]

    one = written(alone, outputs, "interpreted")["x"]
    assert torch.equal(one[0], results[2])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_centred_norm_without_a_bias_takes_an_offset(mode: str) -> None:
    inputs = problem(torch.float32, 64)

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [norm(inputs["x"], inputs["weight"], out["out"], sizes(5), 0, 8, eps=1e-5, offset=1.0, centred=True)]

    out = written(make, {"out": poisoned(5, 64, dtype=torch.float32)}, mode)["out"]
    exact = torch.nn.functional.layer_norm(inputs["x"].double(), [64], inputs["weight"].double() + 1)
    assert_close(out, exact)


def launches() -> list[Launch]:
    """Norms of Llama-3.1-8B, of a small model and of a wide one; of 32 heads, and of a latent without a weight."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    rows = torch.empty(4, dtype=torch.int32, device="meta")
    whole = [norm(meta(64, width), meta(width), meta(64, width), rows, 0, 64, eps=1e-5) for width in (4096, 576, 8192)]
    heads = norm(meta(64, 4096), meta(4096), meta(64, 4096), rows, 0, 64, eps=1e-5, heads=32)
    return [*whole, heads, norm(meta(64, 512), None, meta(64, 512), rows, 0, 64, eps=1e-5)]
