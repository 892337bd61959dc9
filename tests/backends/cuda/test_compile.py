"""Kernels compile for GPUs that need not be here, and their machine code has no stack, no spilled registers, no more
shared memory than there is, and no arithmetic on bfloat16.

Here a launch of each kernel is compiled for Hopper (sm_90), and the heaviest for Ampere (sm_80) and for Blackwell's two
(sm_100, sm_120). `make gpu-compile` does all launches in all configurations for all of them, which takes some minutes.
"""

from __future__ import annotations

import importlib

import pytest
from tests.support.cubin import CAPABILITIES, compiled, faults

from headrace.backends.cuda.launch import Launch

FILES = "attention best choose experts linear linear_8bit linear_codes norm rope_store rows".split()
HEAVY = ("attention", "linear", "linear_codes")


def launches_of(file: str, capability: int) -> list[Launch]:
    """Return the launches of a kernel's file that are meant for a GPU."""
    launches: list[Launch] = importlib.import_module(f"tests.backends.cuda.test_{file}").launches()
    meant = [each for each in launches if not each.config.capabilities or capability in each.config.capabilities]
    # Ampere has no instructions for fp8.
    return [each for each in meant if capability >= 90 or "float8" not in str(list(each.arguments.values()))]


def wrong_with(launches: list[Launch], capability: int) -> list[str]:
    return [fault for launch in launches for fault in faults(compiled(launch, capability))]


@pytest.mark.parametrize("file", FILES)
def test_a_launch_of_each_kernel_compiles_for_hopper(file: str) -> None:
    first = {launch.kernel.name: launch for launch in reversed(launches_of(file, 90))}
    assert first
    assert not wrong_with(list(first.values()), 90)


@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if each != 90])
@pytest.mark.parametrize("file", HEAVY)
def test_the_heaviest_compile_for_other_gpus(file: str, capability: int) -> None:
    assert not wrong_with(launches_of(file, capability)[:1], capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("file", FILES)
def test_every_configuration_compiles_for_every_gpu(file: str, capability: int) -> None:
    launches = launches_of(file, capability)
    assert launches
    wrong = wrong_with(launches, capability)
    assert not wrong, "\n".join(wrong)
