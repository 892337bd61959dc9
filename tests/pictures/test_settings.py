"""What the files of a model leave out is what transformers takes for it, and what they state is verified."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.pictures import Ours, blurred, make_tokenizer
from transformers import (
    CLIPVisionConfig,
    Idefics3VisionConfig,
    InternVLVisionConfig,
    Llama4VisionConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
    SmolVLMVisionConfig,
)

from headrace.models import towers
from headrace.models.decoder import ACTIVATIONS
from headrace.protocol.errors import CheckpointError
from headrace.text.pictures.forms import read_form
from headrace.text.tokenizer import Tokenizer

KINDS: dict[tuple[str, str], Any] = {
    ("idefics3", "idefics3_vision"): Idefics3VisionConfig,
    ("smolvlm", "smolvlm_vision"): SmolVLMVisionConfig,
    ("internvl", "internvl_vision"): InternVLVisionConfig,
    ("mistral3", "pixtral"): PixtralVisionConfig,
    ("llava", "clip_vision_model"): CLIPVisionConfig,
    ("llava", "siglip_vision_model"): SiglipVisionConfig,
    ("llava", "pixtral"): PixtralVisionConfig,
    ("llama4", "llama4_vision_model"): Llama4VisionConfig,
}
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
IDEFICS = ["<image>", "<fake_token_around_image>"]
LLAMA4 = ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
WORDS = ["<img>", "</img>", "<IMG_CONTEXT>", *IDEFICS, *PIXTRAL, *LLAMA4]


@pytest.mark.parametrize(("model_type", "vision"), KINDS)
def test_defaults_are_those_of_transformers(model_type: str, vision: str) -> None:
    theirs, kind = (
        KINDS[model_type, vision](),
        towers.kind_of({"model_type": model_type, "vision_config": {"model_type": vision}}),
    )
    for name, value in kind.defaults.items():
        stated = getattr(theirs, name)
        assert value == (stated[0] if isinstance(stated, list | tuple) else stated), name
    assert kind.activations[theirs.hidden_act] == kind.activations[kind.default_activation]
    if hasattr(theirs, "layer_norm_eps"):
        assert theirs.layer_norm_eps == kind.default_eps


def test_other_activations_than_those_of_the_tower_have_no_place() -> None:
    clip = towers.kind_of({"model_type": "llava", "vision_config": {}})
    assert "quick_gelu" in clip.activations
    assert "quick_gelu" not in ACTIVATIONS
    with pytest.raises(CheckpointError, match="model_type is 'vit', expected one of clip_vision_model"):
        towers.kind_of({"model_type": "llava", "vision_config": {"model_type": "vit"}})


def write(directory: Path, config: dict[str, Any], settings: dict[str, Any], words: Sequence[str] = WORDS) -> Path:
    make_tokenizer(words).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("model_type", "vision", "settings", "reason"),
    [
        (
            "internvl",
            {},
            {"size": {"height": 224, "width": 448}},
            "size is {'height': 224, 'width': 448}, expected the",
        ),
        ("internvl", {"image_size": [56, 56]}, {"size": 56, "do_resize": False}, "do_resize is false, expected true"),
        ("llava", {}, {"size": {"shortest_edge": 336}, "crop_size": 336}, "crop_size is 336, expected the tower's"),
        ("llava", {}, {"size": {"shortest_edge": 224}}, "size is {'shortest_edge': 224}, expected the tower's"),
        ("mistral3", {}, {"size": {"longest_edge": 2049}}, "a longest_edge from 1 to 2048, 128 patches"),
        ("mistral3", {}, {"size": {"height": 56, "width": 56}}, "expected a longest_edge from 1"),
        (
            "idefics3",
            {"patch_size": 14},
            {"max_image_size": {"longest_edge": 126}},
            "of 2 patches of 14 pixels",
        ),
        ("idefics3", {"patch_size": 14}, {"max_image_size": 13}, "max_image_size is 13, expected a longest_edge"),
        ("llama4", {}, {"size": {"height": 336, "width": 336}}, "expected the tower's image_size, 448"),
        ("llava", {"model_type": "pixtral", "patch_size": 14}, {"size": {"longest_edge": 1793}}, "from 1 to 1792"),
    ],
)
def test_settings_for_other_inputs_than_the_towers_are_refused(
    model_type: str, vision: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write(tmp_path, {"model_type": model_type, "vision_config": vision}, settings)
    with pytest.raises(CheckpointError) as raised:
        Ours(tmp_path)
    assert reason in str(raised.value)


@pytest.mark.parametrize("word", LLAMA4)
def test_a_tokenizer_that_lacks_a_word_is_refused(word: str, tmp_path: Path) -> None:
    config = {"model_type": "llama4", "vision_config": {"image_size": 56, "patch_size": 14}}
    write(tmp_path, config, {"size": {"height": 56, "width": 56}}, [each for each in LLAMA4 if each != word])
    with pytest.raises(CheckpointError, match=re.escape(f"the tokenizer lacks {word!r}")):
        Ours(tmp_path)


def test_pictures_that_are_not_read_have_no_form(tmp_path: Path) -> None:
    settings = {"size": {"height": 56, "width": 56}}
    directory = write(
        tmp_path, {"model_type": "paligemma", "vision_config": {"image_size": 56, "patch_size": 14}}, settings
    )
    tokenizer = Tokenizer.load(directory)
    assert read_form(directory, tokenizer) is None
    assert towers.find("paligemma") is None
    write(directory, {"model_type": "llava", "vision_config": {"image_size": 56, "patch_size": 14}}, settings)
    assert read_form(directory, tokenizer) is not None


def test_old_files_have_one_number_for_both_sides(tmp_path: Path) -> None:
    vision = {"image_size": 56, "patch_size": 14}
    stated = [{"size": 56, "crop_size": 56}, {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}]
    read = []
    for i, settings in enumerate(stated):
        directory = tmp_path / str(i)
        ours = Ours(write(directory, {"model_type": "llava", "vision_config": vision}, settings))
        read.append(ours.read("a <image>", [blurred(90, 60, 1)]).pictures)
        ours.close()
    assert read[0] == read[1]
    assert (read[0][0].height, read[0][0].width) == (56, 56)
