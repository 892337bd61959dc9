"""What the tests of the GPU kernels share: run a launch as its twin and interpreted, and compare what they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tests.support.interpreter import run_interpreted
from torch import Tensor

from headrace.backends.cuda.kernels.linear import Scratch
from headrace.backends.cuda.launch import Launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Relative to the largest number: sums in another order, and one rounding to the dtype."""

Maker = Callable[[Mapping[str, Tensor]], Sequence[Launch]]


def backwards(num_programs: int) -> list[int]:
    return list(range(num_programs))[::-1]


def written(
    make: Maker,
    outputs: Mapping[str, Tensor],
    mode: str = "twin",
    order: Callable[[int], list[int]] | None = None,
) -> dict[str, Tensor]:
    """Run the launches that `make` returns for copies of `outputs`, in turn; return the copies."""
    copies = {name: tensor.clone() for name, tensor in outputs.items()}
    for launch in make(copies):
        if mode == "twin":
            launch.run_twin()
        else:
            run_interpreted(launch, order)
    return copies


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of NaN (the largest number for integers): what is not written shows."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Both are NaN at the same places, and elsewhere differ by at most `tolerance` times the largest number."""
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    bound = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    a, b = actual.double(), expected.double()
    assert torch.equal(a.isnan(), b.isnan())
    most = b.nan_to_num().abs().max().clamp(min=1e-6)
    difference = (a - b).nan_to_num().abs().max()
    assert difference <= bound * most, f"differ by {difference:.3g}, largest number {most:.3g}"


def assert_twin_agrees(make: Maker, outputs: Mapping[str, Tensor], tolerance: float | None = None) -> None:
    """The interpreted kernels write what their twins write, and the same bits when the programs run backwards."""
    expected = written(make, outputs)
    actual = written(make, outputs, "interpreted")
    again = written(make, outputs, "interpreted", backwards)
    for name in outputs:
        assert_close(actual[name], expected[name], tolerance)
        assert torch.equal(actual[name].nan_to_num(), again[name].nan_to_num()), f"{name} depends on the order"


def assert_scratch_holds(make: Callable[[Scratch], Launch], needed: tuple[int, int]) -> None:
    """A launch that `make` returns, over scratch of the `needed` numbers, writes nothing behind it."""
    assert all(needed), "nothing is summed in parts"
    memory, counts = torch.full((8 * needed[0],), 7.0), torch.full((8 * needed[1],), 5, dtype=torch.int32)
    scratch = Scratch(memory[: needed[0]], counts[: needed[1]].zero_())
    run_interpreted(make(scratch))
    assert (memory[needed[0] :] == 7).all(), "sums were written behind the scratch"
    assert (counts[needed[1] :] == 5).all(), "programs were counted behind the scratch"
    assert not scratch.arrived.any()
