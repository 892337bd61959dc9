"""The stage `prove`: is all of it right on this GPU, and does the law hold?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.gpu.cases import problems
from bench.gpu.compiling import compile_all, compile_recipes
from bench.gpu.device import Device, ceilings
from bench.gpu.engine import Law
from bench.gpu.families import families
from bench.gpu.probes import launched, probes
from bench.gpu.problems import TOLERANCES, Problem, Tensors
from bench.gpu.report import Report
from headrace.backends.cuda.launch import Config, Launch

Result = dict[str, Any]


def run(report: Report, device: Device) -> None:
    report.run("ceilings", lambda: ceilings(device))
    listed = [(name, make) for name, make in problems(device.toy) if report.wants(name)]
    if device.is_gpu:
        report.run("compile", lambda: compile_all(x for _, make in listed for x in all_launches(make(), device)))
    for name, make in listed:
        report.run(name, lambda make=make: check(make(), device))  # type: ignore[misc]
    if device.is_gpu:
        report.run("compile probes", lambda: compile_recipes(launched(device.toy)))
    for name, probe in probes(device):
        report.run(name, probe)
    for name, probe in Law(device).items():
        report.run(name, probe)
    for name, probe in families(device):
        report.run(name, probe)


def all_launches(problem: Problem, device: Device) -> list[Launch]:
    tensors = problem.fresh(device.name)
    return [launch for config in variants(problem) for launch in problem.make(tensors, config)]


def variants(problem: Problem) -> list[Config | None]:
    """The default config, all others, and those with assembly without it."""
    listed: list[Config | None] = [None, *problem.configs]
    plain = [Config(dict(c.tiles) | {"ASM": 0}, c.num_warps, c.num_stages) for c in problem.configs if "ASM" in c.tiles]
    return [*listed, *plain]


def written(problem: Problem, device: Device, config: Config | None) -> Tensors:
    tensors = problem.fresh(device.name)
    device.run(problem.make(tensors, config))
    return {name: tensors[name].cpu() for name in problem.outputs}


def check(problem: Problem, device: Device) -> Result:
    """Against the twin and float64; the same bits again, and in all configs."""
    expected = problem.fresh("cpu")
    for launch in problem.make(expected, None):
        launch.run_twin()
    actual = written(problem, device, None)
    faults, result = [], {}
    for name, tensor in actual.items():
        error = distance(tensor, expected[name])
        bound = problem.tolerance or TOLERANCES.get(tensor.dtype, 0.0)
        result[f"{name} from twin"] = error
        faults += [f"{name} differs from the twin by {error:.3g}"] * (not error <= bound)
        if name in problem.exact:
            exact = problem.exact[name]
            error = distance(tensor[: len(exact)], exact)
            result[f"{name} from float64"] = error
            faults += [f"{name} differs from float64 by {error:.3g}"] * (not error <= bound)
    if device.is_gpu:
        for config in variants(problem):
            for name, tensor in written(problem, device, config).items():
                if not torch.equal(bits(tensor), bits(actual[name])):
                    faults.append(f"{name}: other bits {'again' if config is None else 'with ' + config.name}")
    return result | {"configs": len(problem.configs), "fault": "; ".join(faults[:8])}


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest number; infinity where NaN are at other places."""
    if not a.dtype.is_floating_point:
        if a.dtype == torch.int8:
            return float((a.short() - b.short()).abs().max()) / 127
        return 0.0 if torch.equal(a, b.to(a.dtype)) else float("inf")
    x, y = a.double(), b.double()
    if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.isinf(), y.isinf()):
        return float("inf")
    x, y = (v.nan_to_num(0, 0, 0) for v in (x, y))
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-6))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
