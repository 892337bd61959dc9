"""Mistral 3: pictures of any size in lines, as transformers' processor and model have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.harness import BACKENDS, load
from tests.support.pictures import (
    LLAMA,
    Theirs,
    answers,
    logits_of,
    make_tokenizer,
    pixtral_processor,
    refusal,
    save_random,
    verify_logits,
    verify_reading,
)
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

WORDS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory, tokenizer = tmp_path_factory.mktemp("mistral3"), make_tokenizer(WORDS)
    vision = {
        "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": 12, "image_size": 112, "patch_size": 7,
    }  # fmt: skip
    config = Mistral3Config(
        text_config=LLAMA | {"vocab_size": len(tokenizer) + 5, "model_type": "mistral", "sliding_window": None},
        vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"), tie_word_embeddings=False,
    )  # fmt: skip
    model = Mistral3ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    images = PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 7, "width": 7})
    processor = pixtral_processor()(images, tokenizer, patch_size=7, spatial_merge_size=2)
    return answers(directory, save_random(model, directory), processor, "[IMG]")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert [len(picture.spans) for picture in prompt.pictures] == [5, 7, 5]
    verify_logits(theirs, prompt, backend)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2, expected -1"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer is [-2, -1], expected -1"),
        (
            {"vision_config.head_dim": 16},
            "vision_config.head_dim is 16, expected hidden_size / num_attention_heads, 12",
        ),
        (
            {"vision_config.rope_parameters": {"rope_type": "yarn"}},
            "rope_type is 'yarn', expected one of default, axial",
        ),
    ],
)
def test_a_config_that_the_tower_does_not_fit_is_refused(
    theirs: Theirs, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in refusal(theirs.directory, tmp_path / "wrong", changes, caplog)


def test_programs_of_a_gpu_turn_heads_by_the_same_places(theirs: Theirs) -> None:
    runner = load(theirs.directory, backend="cuda", device="cpu")
    [logits] = logits_of(runner, [verify_reading(theirs)], [64])
    np.testing.assert_allclose(logits, theirs.logits, atol=1e-4, rtol=0)
