"""Layers over ranks, at the level of operators: the stages of every type of model, in one process."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.harness import RandomModels
from tests.support.stages import programs_of, results, staged

from headrace import models
from headrace.checkpoint.names import text_config
from headrace.parallel import pipeline
from headrace.protocol.errors import RequestError

SHARED = ("gemma4_text",)
"""Types whose last layers read the caches of the first ones, in the tests' size of all of them."""


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", models.names())
def test_every_model_type(name: str, random_models: RandomModels) -> None:
    path = random_models[name]
    vocab_size = text_config(models.find(name).TINY, models.names())["vocab_size"]
    if name in SHARED:
        with pytest.raises(RequestError, match=r"pipeline_parallel_size: 2 .* at most 1, .* from 0 to 3 share caches"):
            staged(path, 2)
        return
    alone = programs_of(path, None)
    wanted = results(alone, vocab_size)
    program, stages = staged(path, 2)
    assert results(program, vocab_size) == wanted
    assert stages.sent > 5  # calls went in pieces
