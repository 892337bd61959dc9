"""The determinism law where some inputs of a layer go through in float and the others as codes (LLM.int8())."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.law import Bits, assert_same, groups_of, make_core, make_requests, run, run_alone
from tests.support.shallow import shallow

from headrace.protocol.step import Request
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint

PATH = Path(shallow())

TEXT = [[(7 * i * i + 3 * i + k) % 2048 for i in range(64)] for k in range(4)]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()[::6]


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("made")
    quantise_checkpoint(PATH, out, Options(method="llm_int8", bits=8, group_size=-1), "bitsandbytes", TEXT)
    return {"model": str(out)}


@pytest.fixture(scope="module")
def reference(requests: list[Request], form: dict[str, Any]) -> dict[str, Bits]:
    return run_alone(requests, **form)


def matrices_of(core: Any) -> list[Any]:
    matrices: list[Any] = core.executor.program.model.ops.matrices
    return matrices


def test_I_13_in_company(requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]) -> None:
    core = make_core(**form)
    assert sum(matrix.outliers is not None for matrix in matrices_of(core)) >= 4
    for group in groups_of(requests, 7):
        assert_same(run(core, group), reference)
    core.close()


def test_I_13_in_chunks_by_two_threads(
    requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]
) -> None:
    core = make_core(max_num_batched_tokens=7, max_num_seqs=6, enable_prefix_caching=False, num_threads=2, **form)
    assert_same(run(core, requests), reference)
    core.close()


def test_the_form_is_another(requests: list[Request], reference: dict[str, Bits]) -> None:
    plain = run_alone(requests[:3])
    assert all(plain[key] != reference[key] for key in plain)
