"""Every kernel, in every configuration, compiles for every GPU it is meant for, and its machine code has no stack, no
spilled registers, no more shared memory than there is, and no arithmetic on bfloat16.

No GPU is needed. On an Ampere GPU (sm_80) and on Blackwell's (sm_100, sm_120) the default configurations are compiled;
for Hopper (sm_90) all of them are.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import tests.backends.cuda
from tests.support.cubin import CAPABILITIES, compiled, faults

from headrace.backends.cuda.launch import Launch

FILES = "attention best choose experts linear linear_8bit linear_codes norm rope_store rows".split()


def launches_of(file: str) -> list[Launch]:
    module: ModuleType = importlib.import_module(f"{tests.backends.cuda.__name__}.test_{file}")
    return list(module.launches())


def chosen(file: str, capability: int) -> list[Launch]:
    launches = [
        launch
        for launch in launches_of(file)
        if not launch.config.capabilities or capability in launch.config.capabilities
    ]
    if capability == 90:
        return launches
    return [launch for launch in launches if launch.config == launch.kernel.configs[0]]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_without_faults(file: str, capability: int) -> None:
    launches = chosen(file, capability)
    assert launches
    wrong = [fault for launch in launches for fault in faults(compiled(launch, capability))]
    assert not wrong, "\n".join(wrong)
