"""The context length that an engine takes of what is asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace.engine.load import choose_max_model_len
from headrace.models.config import ModelConfig
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError

MODEL = ModelConfig({"model_type": "llama", "max_position_embeddings": 128})


@pytest.mark.parametrize(
    ("asked", "length"),
    [
        ({}, 128),
        ({"max_model_len": 100}, 100),
        ({"ctx_size": 0}, 128),
        ({"ctx_size": 100}, 100),
        ({"ctx_size": 8192}, 128),
        ({"ctx_size": 90, "max_model_len": 100}, 90),
    ],
)
def test_the_length_is_the_least_of_what_is_asked(asked: dict[str, Any], length: int, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "headrace"):
        assert choose_max_model_len(EngineConfig(**asked), MODEL) == length
    is_cut = asked.get("ctx_size", 0) > 128
    assert ("ctx_size 8192 is cut to 128" in caplog.text) == is_cut


@pytest.mark.parametrize("asked", [{"max_model_len": 129}, {"ctx_size": 1}, {"ctx_size": -1}])
def test_a_length_that_can_not_be_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(asked))):
        choose_max_model_len(EngineConfig(**asked), MODEL)
