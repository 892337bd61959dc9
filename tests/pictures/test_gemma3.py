"""Gemma 3, whose rows see their picture whole, as transformers' processor and model have it."""

from __future__ import annotations

import pytest
import torch
from tests.support.harness import BACKENDS
from tests.support.pictures import Theirs, answers, make_tokenizer, save_random, verify_logits, verify_reading
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SIDE = 56
TEXT = {
    "model_type": "gemma3_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512, "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    words = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    directory = tmp_path_factory.mktemp("gemma3")
    tokenizer = make_tokenizer([*words.values()], extra_special_tokens=words)
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 7, "vision_use_head": False,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=TEXT | {"vocab_size": len(tokenizer) + 5}, vision_config=vision, mm_tokens_per_image=16,
        image_token_index=tokenizer.convert_tokens_to_ids(words["image_token"]),
        boi_token_index=tokenizer.convert_tokens_to_ids(words["boi_token"]),
        eoi_token_index=tokenizer.convert_tokens_to_ids(words["eoi_token"]),
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    # Crops are made where a call asks for them, not where the file does.
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pan_and_scan=True)
    processor = Gemma3Processor(images, tokenizer, None, image_seq_length=16)
    return answers(directory, save_random(model, directory), processor, words["boi_token"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert [picture.spans[0][1] for picture in prompt.pictures] == [16, 16, 16]
    verify_logits(theirs, prompt, backend)
