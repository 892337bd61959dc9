"""InternVL: tiles and the whole picture, as transformers' processor and model have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import BACKENDS
from tests.support.pictures import (
    LLAMA,
    Theirs,
    answers,
    make_tokenizer,
    refusal,
    save_random,
    verify_logits,
    verify_reading,
    without_video,
)
from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

WORDS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
VIDEO = "<video>"
KINDS: dict[str, dict[str, Any]] = {
    "small": {"attention_bias": True},
    "large": {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
}


@pytest.fixture(scope="module", params=KINDS)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory = tmp_path_factory.mktemp("internvl")
    tokenizer = make_tokenizer([*WORDS.values(), VIDEO], extra_special_tokens=WORDS | {"video_token": VIDEO})
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": [56, 56], "patch_size": [14, 14], "layer_scale_init_value": 0.7,
    }  # fmt: skip
    config = InternVLConfig(
        text_config=LLAMA | {"vocab_size": len(tokenizer) + 5}, vision_config=vision | KINDS[request.param],
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), tie_word_embeddings=False,
    )  # fmt: skip
    model = InternVLForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    images = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=6)
    processor = without_video(InternVLProcessor)(images, tokenizer, image_seq_length=4)
    return answers(directory, save_random(model, directory), processor, "<IMG_CONTEXT>")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert len(prompt.pictures) > 5
    verify_logits(theirs, prompt, backend)


@pytest.mark.parametrize("theirs", ["small"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"downsample_ratio": 0.3}, "4 patches on a side, expected a multiple of 1 / downsample_ratio, 3"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2, expected -1"),
        ({"vision_config.norm_type": "none"}, "norm_type is 'none', expected one of layer_norm, rms_norm"),
        ({"vision_config.patch_size": [14, 7]}, "patch_size is [14, 7], expected an integer"),
    ],
)
def test_a_config_that_the_tower_does_not_fit_is_refused(
    theirs: Theirs, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in refusal(theirs.directory, tmp_path / "wrong", changes, caplog)
