"""What the laws of ranks share."""

from __future__ import annotations

import pytest
from tests.support.harness import RandomModels


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory.mktemp("models"))
