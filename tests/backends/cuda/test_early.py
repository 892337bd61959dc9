"""What is special about buckets of few rows: kernels that begin before the one ahead of them has ended, and attention
in small tiles alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.cuda import test_linear
from tests.support.cubin import compiled, faults
from tests.support.harness import load, save_random

from headrace import models
from headrace.backends.cuda.kernels import attention
from headrace.backends.cuda.launch import Config, Kernel, Launch
from headrace.backends.cuda.tape import EARLY_ROWS, Tape


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    path = tmp_path_factory.mktemp("qwen3")
    save_random(models.find("qwen3").TINY, path)
    program: Any = load(path, dtype="bfloat16", backend="cuda", device="cpu", max_num_batched_tokens=64).program
    tape: Tape = program.tape
    return tape


def launches(tape: Tape, rows: int) -> list[Launch]:
    return [each for each in tape.bind(0, len(tape.nodes), {0: rows, 1: rows, 2: rows}) if isinstance(each, Launch)]


def test_an_early_kernel_waits_for_the_one_ahead_before_it_reads() -> None:
    launch = test_linear.launch_of(4096, 4096, None, 1, False)
    usual, early = compiled(launch, 90), compiled(launch.early(), 90)
    assert "griddepcontrol" not in usual.ptx
    assert early.ptx.index("griddepcontrol.wait") < early.ptx.index("ld.global")
    assert not faults(early)
    assert launch.early().options == launch.options | {"launch_pdl": True}


def test_buckets_of_few_rows_begin_early_on_hopper_alone(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(each.arguments.get("EARLY") for each in launches(tape, 1))
    monkeypatch.setattr(tape, "starts_early", True)
    for rows, is_early in ((1, True), (EARLY_ROWS, True), (EARLY_ROWS + 1, False)):
        names = {each.kernel.name for each in launches(tape, rows) if each.arguments.get("EARLY")}
        assert ({"_linear", "_norm", "_rope_store", "_attention", "_gather", "_best"} <= names) == is_early
        assert bool(names) == is_early


class Deaf:
    """Stands for a jitted function that waits for nothing."""

    arg_names = ("x",)


def test_a_kernel_that_can_not_wait_never_begins_early() -> None:
    launch = Launch(Kernel(Deaf(), lambda a: None), (1,), {"x": 1}, Config())
    assert launch.early() is launch
    assert "launch_pdl" not in launch.options


@pytest.mark.parametrize(("rows", "kinds"), [(1, {0}), (16, {0}), (17, {0, 1})])
def test_no_large_tiles_are_launched_for_few_rows(tape: Tape, rows: int, kinds: set[int]) -> None:
    kernels = (attention.FEW, attention.MANY)
    seen = {kernels.index(each.kernel) for each in launches(tape, rows) if each.kernel in kernels}
    assert seen == kinds
