"""LLaVA with the towers of CLIP, SigLIP and Pixtral, as transformers' processor and model have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
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
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

SIDE = 56
EDGES = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
KINDS: dict[str, dict[str, Any]] = {
    "clip": {"vision_config": {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 14}},
    "padded": {
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": SIDE,
            "patch_size": 14,
            "hidden_act": "gelu",
        },
        "vision_feature_layer": -1,
        "multimodal_projector_bias": False,
    },
    "siglip": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": 14},
        "vision_feature_layer": 2,
        "vision_feature_select_strategy": "full",
    },
    "pixtral": {
        "vision_config": {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "hidden_act": "silu"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}


def processor_of(kind: str, tokenizer: Any) -> Any:
    if kind == "pixtral":
        images = PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
        return pixtral_processor()(images, tokenizer, patch_size=14, spatial_merge_size=1)
    if kind == "siglip":
        images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
        return LlavaProcessor(images, tokenizer, patch_size=14, vision_feature_select_strategy="full")
    images = CLIPImageProcessorPil(**EDGES) if kind == "clip" else LlavaImageProcessorPil(do_pad=True, **EDGES)
    return LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


@pytest.fixture(scope="module", params=KINDS)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    kind, words = request.param, ["<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    directory, tokenizer = tmp_path_factory.mktemp("llava"), make_tokenizer(words)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    mark = "[IMG]" if kind == "pixtral" else "<image>"
    fields = {"tie_word_embeddings": False} | KINDS[kind]
    fields["vision_config"] = sizes | fields["vision_config"]
    config = LlavaConfig(
        text_config=LLAMA | {"vocab_size": len(tokenizer) + 5, "tie_word_embeddings": False},
        image_token_index=tokenizer.convert_tokens_to_ids(mark), **fields,
    )  # fmt: skip
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    return answers(directory, save_random(model, directory), processor_of(kind, tokenizer), mark)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert len(prompt.pictures) == 3
    verify_logits(theirs, prompt, backend)


@pytest.mark.parametrize("theirs", ["clip"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_feature_layer": 0}, "vision_feature_layer is 0, expected one layer of 3, as 1 to 3 or -3 to -1"),
        ({"vision_feature_layer": -4}, "vision_feature_layer is -4"),
        ({"vision_feature_layer": [-2, -3]}, "vision_feature_layer is [-2, -3]"),
        ({"vision_feature_select_strategy": "full"}, "select_strategy is 'full', expected 'default' for this tower"),
        ({"vision_config.model_type": "vit"}, "model_type is 'vit', expected one of clip_vision_model"),
        ({"vision_config.hidden_act": "silly"}, "hidden_act is 'silly', expected one of silu"),
    ],
)
def test_a_config_that_the_tower_does_not_fit_is_refused(
    theirs: Theirs, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in refusal(theirs.directory, tmp_path / "wrong", changes, caplog)


@pytest.mark.parametrize("theirs", ["clip"], indirect=True)
def test_an_inner_layer_is_not_the_last_one(theirs: Theirs, tmp_path: Path) -> None:
    prompt = verify_reading(theirs)
    shutil.copytree(theirs.directory, tmp_path / "last")
    path = tmp_path / "last" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_feature_layer": -1}))
    [logits] = logits_of(load(tmp_path / "last"), [prompt], [512])
    assert abs(logits[-1] - theirs.logits[-1]).max() > 1e-2


@pytest.mark.parametrize("theirs", ["clip"], indirect=True)
def test_other_spellings_of_the_tensors_names_are_the_same_model(theirs: Theirs, tmp_path: Path) -> None:
    prompt = verify_reading(theirs)
    [before] = logits_of(load(theirs.directory), [prompt], [512])
    directory = tmp_path / "spelt"
    shutil.copytree(theirs.directory, directory)
    spellings = {
        "vision_tower.": "model.vision_tower.vision_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
    }
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        old, new = next(pair for pair in spellings.items() if name.startswith(pair[0]))
        tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, directory / "model.safetensors")
    [after] = logits_of(load(directory), [prompt], [512])
    np.testing.assert_array_equal(after, before)
