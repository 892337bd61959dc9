"""Whether the kernel without an interpreter, `linear_ws`, gives the bits of those it stands for, on this GPU.

It is compared with them on small ragged problems, once for each process, device and type of weights, before the first
layer is bound to it. Where a bit differs, or it does not compile or run, the others are used for all rows, and the log
says why: they are slower there and right. Called by `tape`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels import linear, linear_8bit, linear_ws
from headrace.backends.cuda.launch import Config, Launch
from headrace.backends.cuda.replay import compile_kernels

CAPABILITY = (9, 0)
"""Of the GPUs whose instructions `linear_ws` names."""

FEW = 64
"""Rows that the kernel to compare with is configured for: it then shares spans among programs, as in decoding."""

PROGRAMS = 3
"""Fewer than tiles, so that a program computes several."""

Candidate = Callable[..., Launch]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """A linear layer of `num_rows` rows in a bucket of `bucket`. Ends of K and N are within tiles."""

    num_rows: int
    bucket: int
    num_out: int
    num_in: int
    gated: bool = False
    activation: Activation | None = None
    bias: bool = False
    residual: bool = False
    wide: bool = False
    """Whether the results are float32, as logits are: no rounding hides a difference."""


PROBLEMS = (
    Problem(130, 200, 200, 1808, bias=True, residual=True),
    Problem(65, 65, 272, 624, gated=True, activation="silu"),
    Problem(100, 128, 144, 1104, gated=True, activation="gelu_tanh", bias=True, wide=True),
    Problem(66, 100, 330, 336, wide=True),
)
"""Spans nested and one, gated and not, in the least and in more tiles of rows."""


@functools.cache
def is_trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers with weights of `dtype` may be bound to `linear_ws`."""
    if device.type != "cuda" or dtype not in linear_ws.TYPES or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return agrees(device, dtype)


def agrees(
    device: torch.device,
    dtype: torch.dtype,
    candidate: Candidate = linear_ws.linear_ws,
    problems: Sequence[Problem] = PROBLEMS,
) -> bool:
    """Whether `candidate` gives the bits of the kernels it stands for; if not, the log says what differs."""
    try:
        difference = next(differences(device, dtype, candidate, problems), "")
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    if difference:
        logger.warning("linear layers of many rows run in the kernel for few rows, which is slower: %s", difference)
    return not difference


def differences(
    device: torch.device, dtype: torch.dtype, candidate: Candidate, problems: Sequence[Problem]
) -> Iterator[str]:
    """Yield what `candidate` does otherwise, in each problem and configuration."""
    cases = [(problem, _operands(problem, device, dtype)) for problem in problems]
    configs = {
        problem: [c for c in linear_ws.KERNEL.configs if linear_ws.suits(c, operands["weight"], problem.gated)]
        for problem, operands in cases
    }

    def with_config(config: Config) -> Candidate:
        return functools.partial(candidate, config=config)

    if device.type == "cuda":
        compile_kernels(
            _launch(problem, operands, operands["out"], make)
            for problem, operands in cases
            for make in [_usual, *map(with_config, configs[problem])]
        )
    for problem, operands in cases:
        expected = _written(problem, operands, _usual)
        for config in configs[problem]:
            actual = _written(problem, operands, with_config(config))
            count = int((actual != expected).sum())
            if count:
                yield f"{count} of {actual.numel()} numbers have other bits in {problem}, {dtype}, {config.name}"


def _operands(problem: Problem, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random rows with NaN behind their inputs and behind the step's rows, one of them of -0; the weights."""
    generator = torch.Generator().manual_seed(problem.num_in)

    def random(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    num_in, outputs = problem.num_in, problem.num_out * (1 + problem.gated)
    x = torch.full((problem.bucket, num_in + 16), torch.nan)
    x[: problem.num_rows, :num_in] = random(problem.num_rows, num_in)
    x[1, :num_in] = -0.0
    half = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    operands = {
        "x": x.to(dtype),
        "weight": (random(outputs, num_in) * (1 if dtype == torch.float8_e4m3fn else num_in**-0.5)).to(dtype),
        "sizes": torch.full((1,), problem.num_rows, dtype=torch.int32),
        "out": torch.full((problem.bucket + 1, problem.num_out), torch.nan).to(torch.float32 if problem.wide else half),
    }
    if dtype == torch.float8_e4m3fn:
        operands["x_scales"] = random(1, problem.bucket).abs() + 0.5
        operands["w_scales"] = random(outputs, 1).abs() * num_in**-0.5
    if problem.bias:
        operands["bias"] = random(outputs)
    if problem.residual:
        operands["residual"] = random(problem.bucket, problem.num_out, kind=half)
    return {name: tensor.to(device) for name, tensor in operands.items()}


def _launch(problem: Problem, operands: dict[str, Tensor], out: Tensor, make: Candidate) -> Launch:
    options = {name: operands[name] for name in ("bias", "residual", "x_scales", "w_scales") if name in operands}
    return make(
        operands["x"][:, : problem.num_in], operands["weight"], out, operands["sizes"], 0, problem.bucket,
        num_programs=PROGRAMS, activation=problem.activation, gated=problem.gated, **options,
    )  # fmt: skip


def _written(problem: Problem, operands: dict[str, Tensor], make: Candidate) -> Tensor:
    """Return the bits that a launch leaves in the output: rows that are none of the step's too."""
    out = operands["out"].clone()
    launch = _launch(problem, operands, out, make)
    if out.device.type == "cuda":
        launch.run_gpu()
    else:
        launch.run_twin()
    return out.view(torch.int32 if problem.wide else torch.int16).cpu()


def _usual(
    x: Tensor, weight: Tensor, out: Tensor, sizes: Tensor, dim: int, num_rows: int, *, gated: bool,
    x_scales: Tensor | None = None, w_scales: Tensor | None = None, **options: Any,
) -> Launch:  # fmt: skip
    """The launch that the candidate is compared with, in the configuration of few rows."""
    config: Config
    if x_scales is None or w_scales is None:
        config = linear.default(weight, FEW, gated)
    else:
        config = linear_8bit.default(weight, FEW, gated, grouped=False)
    needed = linear.scratch_numbers(weight, num_rows, config)
    scratch = None
    if any(needed):
        partial, arrived = (torch.zeros(size, device=x.device) for size in needed)
        scratch = linear.Scratch(partial, arrived.int())
    options |= {"gated": gated, "scratch": scratch, "config": config}
    if x_scales is None or w_scales is None:
        return linear.linear(x, weight, out, sizes, dim, num_rows, **options)
    return linear_8bit.linear_8bit(x, x_scales, weight, w_scales, out, sizes, dim, num_rows, **options)
