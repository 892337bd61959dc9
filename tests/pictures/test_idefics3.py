"""Idefics3: tiles and the whole picture, as transformers' processor and model have them."""

from __future__ import annotations

from pathlib import Path

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
)
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

TILES = [f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7)]
WORDS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory, tokenizer = tmp_path_factory.mktemp("idefics3"), make_tokenizer(WORDS)
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
        "patch_size": 14,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=LLAMA | {"vocab_size": len(tokenizer) + 5}, vision_config=vision, scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4)
    return answers(directory, save_random(model, directory), processor, "<image>")


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
