"""Idefics3: tiles and the whole picture, as transformers' processor and model have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import picture_model
from tests.support.harness import BACKENDS
from tests.support.pictures import Theirs, answers, refusal, verify_logits, verify_reading


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory = tmp_path_factory.mktemp("idefics3")
    return answers(directory, *picture_model.write(directory), "<image>")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert len(prompt.pictures) == 13
    verify_logits(theirs, prompt, backend)


def test_a_config_that_the_tower_does_not_fit_is_refused(
    theirs: Theirs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = refusal(theirs.directory, tmp_path / "wrong", {"vision_config.hidden_act": "swish9"}, caplog)
    assert "hidden_act is 'swish9'" in reason
