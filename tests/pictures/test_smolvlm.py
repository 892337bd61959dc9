"""SmolVLM: Idefics3's tower and tiles under another name, as transformers' processor and model have them."""

from __future__ import annotations

import pytest
import torch
from tests.support.harness import BACKENDS
from tests.support.picture_model import WORDS
from tests.support.pictures import (
    LLAMA,
    Theirs,
    answers,
    make_tokenizer,
    save_random,
    verify_logits,
    verify_reading,
    without_video,
)
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory, tokenizer = tmp_path_factory.mktemp("smolvlm"), make_tokenizer([*WORDS, "<video>"])
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
        "patch_size": 7,
    }  # fmt: skip
    config = SmolVLMConfig(
        text_config=LLAMA | {"vocab_size": len(tokenizer) + 5}, vision_config=vision, scale_factor=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = SmolVLMForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    images = SmolVLMImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing_smolvlm, "num2words", str)  # a library that spells the frames of videos
        kind = without_video(processing_smolvlm.SmolVLMProcessor)
        return answers(
            directory, save_random(model, directory), kind(images, tokenizer, None, image_seq_len=4), "<image>"
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert len(prompt.pictures) == 13
    verify_logits(theirs, prompt, backend)
