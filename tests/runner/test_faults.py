"""Whose fault an exception is: of a request, of nobody's (then the engine ends), or of a GPU that is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import write_llama
from tests.support.steps import IDS, A, B, batch_of, make_runner

from headrace.runner import faults
from headrace.runner.faults import INTERNAL, StepFaults, is_device_lost
from headrace.runner.runner import Runner

ILLEGAL = "an illegal memory access was encountered"
LOST: list[BaseException] = [
    RuntimeError(f"CUDA error: {ILLEGAL}\nCUDA kernel errors might be reported at some other call"),
    RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}"),
    torch.AcceleratorError("device-side assert triggered"),
]
OTHERS: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error"),
    IndexError("a prompt of a client: CUDA error"),
    RuntimeError("no CUDA error"),
]


WELL, SICK = IDS[:5], IDS[5:12]
STEP = ((0, WELL, A), (0, SICK, B))


def name(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:20]}"


@pytest.mark.parametrize("error", LOST, ids=name)
def test_an_error_that_stays_with_the_device_is_of_no_request(error: BaseException) -> None:
    assert is_device_lost(error)
    assert StepFaults().reason(error) == StepFaults().reason(error, 1) == ""


@pytest.mark.parametrize("error", OTHERS, ids=name)
def test_other_errors_are_of_the_request(error: BaseException) -> None:
    assert not is_device_lost(error)
    assert StepFaults().reason(error) == f"{INTERNAL}{type(error).__name__}"


def test_a_gpu_without_memory_is_not_lost() -> None:
    assert not is_device_lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


@pytest.fixture(params=["cpu", "cuda"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    device = {"device": "cpu"} if request.param == "cuda" else {}
    return make_runner(write_llama(tmp_path), request.param, **device)


def spoil(runner: Runner, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make every step raise in which the second request is computed."""
    program: Any = runner.program
    for method in ("forward", "start"):
        if hasattr(program, method):

            def call(chunks: Any, *args: Any, real: Any = getattr(program, method), **options: Any) -> Any:
                if SICK in [list(ids) for ids in chunks.token_ids]:
                    raise error
                return real(chunks, *args, **options)

            monkeypatch.setattr(program, method, call)


def test_an_engine_ends_with_its_device(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(runner, monkeypatch, LOST[0])
    with pytest.raises(RuntimeError, match="CUDA error"):
        runner.run(batch_of(*STEP))


def test_an_engine_outlives_the_fault_of_a_request(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(runner, monkeypatch, OTHERS[0])
    assert runner.run(batch_of(*STEP)).column("error") == {1: f"{INTERNAL}RuntimeError"}


def test_control_a_lost_device_that_is_a_requests_fault_is_noticed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "is_device_lost", lambda error: False)
    with pytest.raises(pytest.fail.Exception):
        test_an_engine_ends_with_its_device(runner, monkeypatch)
