"""Compiles kernels in many processes before they are needed: Triton keeps what they compile in its cache on disk."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bench.gpu.device import Device
from headrace.backends.cuda.launch import Argument, Launch

Recipe = dict[str, Any]
MOST_PROCESSES = 16


class Recorder(Device):
    """A device that runs nothing and keeps recipes: what its callers compute is void."""

    def __init__(self, toy: bool) -> None:
        super().__init__(toy)
        self.recipes: list[Recipe] = []

    def run(self, launches: Sequence[Launch]) -> None:
        self.recipes += map(recipe, launches)


class Pointer:
    """Stands for a tensor: Triton compiles for its type and for whether its address is a multiple of 16."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address
        self.shape = [1]

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0


def recipe(launch: Launch) -> Recipe:
    """Return what a process needs to compile a launch, without its tensors."""
    arguments = {name: kept(value) for name, value in launch.arguments.items()}
    return {
        "module": launch.kernel.jit.fn.__module__,
        "name": launch.kernel.name,
        "arguments": arguments,
        "constants": dict(launch.config.tiles),
        "options": launch.options,
    }


def kept(value: Argument) -> tuple[Any, ...]:
    """Return an argument without its memory: its kind, and what the machine code may depend on."""
    if isinstance(value, TensorDescriptor):
        return "tiles", value.base.dtype, tuple(value.block_shape), value.layout
    return ("tensor", value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else ("plain", value)


def signature(recipe: Recipe) -> str:
    """Return what the machine code depends on: of integers, whether they are 1 or multiples of 16."""
    jit = getattr(importlib.import_module(recipe["module"]), recipe["name"])
    parameters = {parameter.name: parameter for parameter in jit.params}

    def key(name: str, value: tuple[Any, ...]) -> object:
        if parameters[name].do_not_specialize:
            return "any"
        if value[0] != "plain" or parameters[name].is_constexpr or isinstance(value[1], float | str | None):
            return value
        return value[1] if value[1] == 1 else (value[1] % 16 == 0, abs(value[1]) < 2**31)

    keys = {name: key(name, value) for name, value in recipe["arguments"].items()}
    return repr((recipe["module"], recipe["name"], keys, recipe["constants"], recipe["options"]))


def standing(kind: str, *values: Any) -> Any:
    """Return what stands for an argument that `kept` gave, where it is compiled for."""
    if kind == "tiles":
        dtype, tile, layout = values
        return TensorDescriptor(Pointer(dtype, 0), list(tile), [tile[1], 1], list(tile), layout)
    return Pointer(*values) if kind == "tensor" else values[0]


def compile_one(recipe: Recipe) -> str:
    """Compile a recipe in this process. Returns the error, or nothing."""
    try:
        jit = getattr(importlib.import_module(recipe["module"]), recipe["name"])
        arguments = {name: standing(*value) for name, value in recipe["arguments"].items()}
        jit.warmup(grid=(1,), **arguments, **recipe["constants"], **recipe["options"])
    except Exception as error:
        return f"{recipe['name']} {recipe['constants']}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(launches: Iterable[Launch]) -> dict[str, Any]:
    """Compile what the launches need. They are forgotten one after the other, with their tensors."""
    return compile_recipes(map(recipe, launches))


def compile_recipes(recipes: Iterable[Recipe]) -> dict[str, Any]:
    """Compile recipes, each kind once. Returns counts and errors: what failed is compiled later, by its first run, or
    fails there."""
    by_signature = {signature(each): each for each in recipes}
    workers = min(MOST_PROCESSES, os.cpu_count() or 1, len(by_signature))
    if workers == 0:
        return {"kernels": 0}
    errors: list[str] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(compile_one, each) for each in by_signature.values()]
        for count, future in enumerate(as_completed(waiting), 1):
            errors += [future.result()] if future.result() else []
            if count % 16 == 0 or count == len(by_signature):
                print(f"compiled {count} of {len(by_signature)} kernels", file=sys.stderr, flush=True)
    fault = f"{len(errors)} failed, such as {errors[0]}" if errors else ""
    return {"kernels": len(by_signature), "errors": errors[:20], "fault": fault}
