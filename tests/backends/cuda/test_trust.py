"""The check before a kernel without an interpreter is used: what it finds, and that a whole program follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.test_program import chunks_of, last_logits
from tests.formats.quantised.formats import fp8
from tests.support.harness import load, save_random

from headrace import models
from headrace.backends.cuda import trust
from headrace.backends.cuda.kernels import linear, linear_ws
from headrace.backends.cuda.launch import Arguments, Kernel, Launch
from headrace.backends.cuda.program import CudaProgram, planned_bytes

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LENGTH = 128
"""Positions of a sequence."""
SMALL = (trust.Problem(5, 6, 8, 1104, bias=True, wide=True), trust.Problem(3, 4, 8, 80, gated=True, activation="silu"))


def fake(twin: Callable[[Arguments], None]) -> trust.Candidate:
    """Return what makes launches of a kernel that computes as `twin`."""

    def make(*args: Any, **options: Any) -> Launch:
        launch = linear_ws.linear_ws(*args, **options)
        return replace(launch, kernel=Kernel(linear_ws.KERNEL.jit, twin, linear_ws.KERNEL.configs, fuse=False))

    return make


def splits_otherwise(a: Arguments) -> None:
    linear_ws.KERNEL.twin(Arguments(**{**vars(a), "SPAN": 256}))


def one_bit(a: Arguments) -> None:
    linear_ws.KERNEL.twin(a)
    a.out.view(torch.int16)[2, 3] ^= 1


def beyond(a: Arguments) -> None:
    linear_ws.KERNEL.twin(a)
    a.out[int(a.sizes[0]), 0] = 0


def fails(a: Arguments) -> None:
    raise RuntimeError("out of resources")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_the_twins_agree(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert trust.agrees(CPU, dtype, problems=SMALL)
    assert caplog.text == ""


@pytest.mark.parametrize("twin", [splits_otherwise, one_bit, beyond, fails])
def test_a_kernel_that_does_otherwise_is_not_used_and_the_log_says_why(
    twin: Callable[[Arguments], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert not trust.agrees(CPU, torch.bfloat16, fake(twin), SMALL)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    reason = {fails: "RuntimeError: out of resources", one_bit: "1 of 56 numbers", beyond: "1 of 56 numbers"}
    assert reason.get(twin, "numbers have other bits in Problem(num_rows=5") in record.message


def test_the_problems_have_ragged_ends_and_spans_of_both_kinds() -> None:
    kinds = set()
    for problem in trust.PROBLEMS:
        outputs = problem.num_out * (1 + problem.gated)
        kinds.add((linear.num_spans(outputs, problem.num_in) > 1, problem.gated))
        assert problem.num_in % linear_ws.STEP_BYTES
        assert problem.num_rows % 64
        assert linear_ws.can_load(torch.empty(1, problem.num_in, dtype=FP8, device="meta"))
    assert len(kinds) == 4
    assert min(problem.num_rows for problem in trust.PROBLEMS) == linear_ws.MOST_FEW + 1


def test_neither_a_cpu_nor_float32_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trust.is_trusted(CPU, torch.bfloat16)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not trust.is_trusted(gpu, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not trust.is_trusted(gpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not trust.is_trusted(gpu, torch.float16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_random(models.find("qwen3").TINY, path)
    return path


def program_of(directory: Path, **more: Any) -> CudaProgram:
    options = {"backend": "cuda", "device": "cpu", "dtype": "bfloat16", "max_num_batched_tokens": 160}
    options |= {"max_model_len": LENGTH}
    program = load(directory, **(options | more)).program
    assert isinstance(program, CudaProgram)
    return program


def kernels(program: CudaProgram, num_rows: int) -> list[str]:
    """Return the kernels of the linear layers of a step."""
    launches = program.whole.launches(program.whole.bucket(num_rows))
    return [each.kernel.name for each in launches if isinstance(each, Launch) and "linear" in each.kernel.name]


@pytest.mark.parametrize("kind", ["plain", "int4", "fp8"])
def test_a_program_has_the_same_bits_with_the_kernel(
    kind: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"quantization": "int4"} if kind == "int4" else {}
    directory = fp8(tmp_path, None).directory if kind == "fp8" else directory
    without = program_of(directory, **options)
    chunks = chunks_of([90, 60], without)
    expected = last_logits(without, chunks)
    assert "_linear_ws" not in kernels(without, 150)
    types: set[torch.dtype] = set()

    def is_trusted(device: torch.device, dtype: torch.dtype) -> bool:
        types.add(dtype)
        return True

    monkeypatch.setattr(trust, "is_trusted", is_trusted)
    program = program_of(directory, **options)
    assert (last_logits(program, chunks) == expected).all()
    assert types == {torch.bfloat16, *([FP8] if kind == "fp8" else [])}
    many = kernels(program, 150)
    assert many.count("_linear_ws") > len(many) / 2 > 0
    assert "_linear_ws" not in kernels(program, linear_ws.MOST_FEW)
    planned = planned_bytes(program.model, program.model.ops, program.max_rows, program.max_logits, LENGTH)
    assert planned == program.num_bytes


def test_a_program_without_trust_has_only_the_kernels_of_triton(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "is_trusted", lambda device, dtype: False)
    many = kernels(program_of(directory), 150)
    assert many
    assert set(many) == {"_linear"}
