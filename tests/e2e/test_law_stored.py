"""The determinism law for matrices of several forms, and for those whose inputs have an order of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.law import Bits, assert_same, groups_of, make_core, make_requests, run, run_alone
from tests.support.shallow import shallow
from tests.support.stored import mixed

from headrace.protocol.step import Request


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed(Path(shallow(2)), tmp_path_factory.mktemp("law") / "mixed")


@pytest.fixture(scope="module", params=["int8", "16bit"])
def form(request: pytest.FixtureRequest, path: Path) -> dict[str, Any]:
    return {"model": str(path), "activations": request.param}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()[::6]


@pytest.fixture(scope="module")
def reference(requests: list[Request], form: dict[str, Any]) -> dict[str, Bits]:
    return run_alone(requests, **form)


def test_I_13_in_company(requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]) -> None:
    core = make_core(**form)
    for group in groups_of(requests, 9):
        assert_same(run(core, group), reference)
    core.close()


def test_I_13_in_chunks_by_two_threads(
    requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]
) -> None:
    more = {"max_num_batched_tokens": 7, "max_num_seqs": 6, "enable_prefix_caching": False, "num_threads": 2}
    core = make_core(**(form | more))
    assert_same(run(core, requests[::2]), reference)
    core.close()
