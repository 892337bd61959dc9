"""A runner of the tiny llama, on either backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoints import write_llama
from tests.support.steps import make_runner

from headrace.runner.runner import Runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["cpu", "torch_ref"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(directory: Path, backend: str) -> Runner:
    return make_runner(directory, backend)
