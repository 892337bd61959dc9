"""Kernels compile for GPUs that need not be here, and their machine code has no stack, where spilled registers would
lie, no more shared memory than there is, no arithmetic on bfloat16, and no products out of the order of K.

`make test` compiles, for Hopper (sm_90), each configuration that is taken (the defaults, and those that files in
`tuned` name) of every third file of kernels, and some of the heaviest for Ampere (sm_80) and
Blackwell's two (sm_100, sm_120). The rest, and what else `make gpu-check` may try when it tunes, is compiled
by slow tests (`pytest -m slow tests/backends/cuda`), minutes long. Triton keeps what it compiled on disk, by the hash
of the source and of itself.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.backends.cuda import (
    test_attention,
    test_expert_forms,
    test_experts,
    test_linear,
    test_linear_8bit,
    test_linear_codes,
    test_linear_ws,
)
from tests.backends.cuda.test_linear import meta
from tests.support.cubin import CAPABILITIES, compiled, faults

from headrace.backends.cuda import tuned
from headrace.backends.cuda.kernels import experts, linear, linear_8bit, linear_codes, linear_ws
from headrace.backends.cuda.launch import Launch
from headrace.backends.cuda.program import MAX_ROWS, bucket_sizes
from headrace.quant.schemes import Scheme

FILES = (
    "attention best by_head carry choose expert_forms experts linear linear_8bit linear_codes linear_ws norm recur "
    "rope_store routing rows xielu"
).split()
HEAVY = ("attention", "linear", "linear_codes")
LARGE = ("_attention", "_survey", "_settle", "_linear", "_linear_codes", "_linear_8bit", "_grouped")
"""Kernels of which the types of the tensors are left to the slow test."""
ROWS = (1, 17, 33, 65)
"""One number of rows for each tile."""
SHAPES = ((4096, 4096, False), (14336, 4096, True))
"""Outputs, inputs, gated."""


def launches_of(file: str, capability: int) -> list[Launch]:
    """Return the launches of a kernel's file that are meant for a GPU."""
    launches: list[Launch] = importlib.import_module(f"tests.backends.cuda.test_{file}").launches()
    # Ampere has no instructions for fp8.
    return [
        each
        for each in launches
        if each.config.fits(capability) and (capability >= 90 or "float8" not in str(list(each.arguments.values())))
    ]


def defaults(file: str, capability: int) -> list[Launch]:
    """Return launches in the configurations that are taken where nothing was measured."""
    if file == "attention":
        return [each for each in launches_of(file, capability) if test_attention.is_default(each, capability)]
    if file == "experts":
        few = [
            each for rows in (16, 128, 256, 2048) for each in test_experts.launches_of(4096, 14336, 8, 2, num_rows=rows)
        ]
        return [*few, *test_experts.launches_of(64, 128, 4, 2, torch.float32)]
    if file == "expert_forms":
        return test_expert_forms.usual()
    if file == "linear":
        launches = [test_linear.launch_of(n, k, None, rows, gated) for rows in ROWS for n, k, gated in SHAPES]
        return [*launches, test_linear.launch_of(1536, 576, None, 1, True, torch.float32)]
    if file == "linear_8bit" and capability >= 90:
        launches = [
            test_linear_8bit.launch_of(grouped, None, n, k, gated, rows)
            for grouped in (False, True)
            for rows in ROWS
            for n, k, gated in SHAPES
        ]
        return [*launches, *[each for each in test_linear_8bit.launches() if each.kernel is linear_8bit.ROUND_ROWS]]
    if file == "linear_ws" and capability == 90:
        types = (torch.bfloat16, torch.float8_e4m3fn)
        launches = [test_linear_ws.launch_of(n, k, None, gated, kind) for kind in types for n, k, gated in SHAPES]
        return [*launches, test_linear_ws.launch_of(128256, 4096, None, out_dtype=torch.float32)]
    if file == "linear_codes":
        schemes = (Scheme("i4", 64, book="iq4_nl"), Scheme("i4", 32), Scheme("i4", 64, True), Scheme("i8"))
        schemes += (Scheme("i4", 32, book="e2m1"),)
        launches = [
            launch
            for scheme in schemes
            for rows in ROWS[:3]
            for n, k, gated in SHAPES
            for launch in test_linear_codes.launch_of(scheme, n, k, gated=gated, num_rows=rows)
        ]
        wide = [test_linear_codes.launch_of(scheme, 4096, 4096, wide=True, num_rows=65)[0] for scheme in schemes]
        return launches + wide
    others = launches_of(file, capability)
    return [each for each in others if each.config.name not in {config.name for config in each.kernel.configs[1:]}]


def named(file: str, capability: int, folder: Path = tuned.FOLDER) -> list[Launch]:
    """Return the launches whose configurations a file of measured ones names."""
    names = {
        (kernel.removeprefix("attention "), name)
        for path in folder.glob("*.json")
        for kernel, shapes in tuned.read(path.stem, folder).items()
        for by_rows in shapes.values()
        for name in by_rows.values()
    }
    # One kernel stands for others where rows are many, and the fastest may be theirs.
    names |= {(kernel, name) for key, name in names if key == "_linear_ws" for kernel in ("_linear", "_linear_8bit")}
    few = {"_attention": {0: "few", 1: "many"}}
    return [
        each
        for each in launches_of(file, capability)
        if (few.get(each.kernel.name, {}).get(each.arguments.get("KIND"), each.kernel.name), each.config.name) in names
    ]


def once(launches: list[Launch], capability: int) -> Iterator[Launch]:
    """Yield the first launch of each kernel, configuration and way of reading codes; of small kernels of all types."""
    seen = set()
    for each in launches:
        values = each.arguments
        small = capability == 90 and each.kernel.name not in LARGE
        types = {value.dtype for value in values.values() if isinstance(value, torch.Tensor) and small}
        # H: inputs of a step of codes.
        way = values.get("H"), values.get("mins") is None, values.get("key_scales") is None, values.get("WIDE")
        way += values.get("SHARED"), values.get("IN_PARTS"), values.get("REST"), values.get("sinks") is None
        key = (each.kernel.name, each.config.name, way, frozenset(types))
        if key not in seen:
            seen.add(key)
            yield each


def wrong_with(launches: list[Launch], capability: int) -> list[str]:
    return [fault for launch in launches for fault in faults(compiled(launch, capability))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if each != 90])
@pytest.mark.parametrize("file", HEAVY)
def test_the_heaviest_compile_for_other_gpus(file: str, capability: int) -> None:
    launches = list(once(defaults(file, capability), capability))
    assert not wrong_with([max(launches, key=lambda each: math.prod(each.config.tiles.values()))], capability)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in CAPABILITIES if each != 90)]
)
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_compiles_in_the_configurations_that_are_taken(file: str, capability: int) -> None:
    assert not wrong_with(list(once(defaults(file, capability), capability)), capability)
    # Of those that were measured to be the fastest a few registers may lie on the stack.
    measured = wrong_with(list(once(named(file, capability), capability)), capability)
    assert not [fault for fault in measured if "stack of" not in fault]


def taken(num_out: int, num_in: int, gated: bool, rows: int) -> set[tuple[str, str]]:
    """Return the kernels of a linear layer with the configurations that are the defaults for it."""
    plain, eight = meta(num_out, num_in), meta(num_out, num_in, dtype=torch.float8_e4m3fn)
    wide = meta(num_out, num_in, dtype=torch.float32)
    pairs = [(linear.KERNEL, linear.default(weight, rows, gated)) for weight in (plain, wide)]
    pairs += [(linear_8bit.KERNEL, linear_8bit.default(eight, rows, gated, grouped)) for grouped in (False, True)]
    if rows <= linear_codes.MOST_ROWS:
        for scheme in test_linear_codes.SCHEMES_HERE:
            launches = test_linear_codes.launch_of(scheme, num_out // (1 + gated), num_in, gated=gated, num_rows=rows)
            pairs += [(each.kernel, each.config) for each in launches]
    specialised = [linear_ws.default(weight, rows, gated) for weight in (plain, eight)]
    pairs += [(linear_ws.KERNEL, config) for config in specialised if config is not None]
    pairs += [(experts.GROUPED, experts.default(meta(8, num_out, num_in), rows))]
    return {(kernel.name, config.name) for kernel, config in pairs}


def test_no_configuration_that_is_taken_is_left_out() -> None:
    files = ("experts", "linear", "linear_8bit", "linear_codes", "linear_ws")
    compiled_here = {(each.kernel.name, each.config.name) for file in files for each in once(defaults(file, 90), 90)}
    shapes = [*[(n * (1 + gated), k, gated) for n, k, gated in SHAPES], (6144, 4096, False), (1536, 576, False)]
    shapes += [(128256, 2048, False), (2048, 8192, False), (96, 64, True), (4096, 14336, False)]
    for shape in shapes:
        for rows in bucket_sizes(MAX_ROWS):
            assert taken(*shape, rows) <= compiled_here, (shape, rows)


def test_configurations_that_a_file_names_are_compiled(tmp_path: Path) -> None:
    name, few = linear.KERNEL.configs[-1].name, test_attention.kernel.FEW.configs[1].name
    table = {"_linear": {"64x64 bfloat16": {"8": name}}, "attention few": {"32/8x128": {"1": few}}}
    (tmp_path / "h200.json").write_text(json.dumps({"kernels": table}))
    assert {each.config.name for each in named("linear", 90, tmp_path)} == {name}
    assert {each.config.name for each in named("attention", 90, tmp_path)} == {few}
    assert named("linear", 120, tmp_path) == []
    assert named("rows", 90, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("file", FILES)
def test_every_configuration_compiles_for_every_gpu(file: str, capability: int) -> None:
    launches = launches_of(file, capability)
    assert launches or (file, capability != 90) == ("linear_ws", True)
    wrong = wrong_with(launches, capability)
    assert not wrong, "\n".join(wrong)
    # What has no stack has no spilled registers: here the instructions are read too.
    assert not any(compiled(each, capability).count(name) for each in launches for name in ("LDL", "STL"))
