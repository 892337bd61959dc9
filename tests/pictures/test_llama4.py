"""Llama 4: tiles with separators, as transformers' processor and model have them.

The processor needs torchvision, for which Pillow's resizing stands in: the rules are the processor's own.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from operator import methodcaller
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.harness import BACKENDS
from tests.support.pictures import (
    MARK,
    PROMPT,
    SIZES,
    Theirs,
    blurred,
    make_tokenizer,
    refusal,
    save_random,
    verify_logits,
    verify_reading,
)
from transformers import Llama4Config, Llama4ForConditionalGeneration
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor

from headrace.models.llama4_text import TINY
from headrace.text.pictures.cuts import Settings, llama4

SIDE = 56
MARKS = ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]


def resized(pictures: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
    """Resize one picture [1, 3, height, width] of bytes."""
    image = Image.fromarray(pictures[0].permute(1, 2, 0).numpy())
    numbers = np.asarray(image.resize((size.width, size.height), Image.Resampling.BILINEAR))
    return torch.from_numpy(numbers.copy()).permute(2, 0, 1)[None]


def normed(pictures: torch.Tensor, mean: Any, deviation: Any) -> torch.Tensor:
    rows = (torch.tensor(values, dtype=pictures.dtype)[:, None, None] for values in (mean, deviation))
    return (pictures - next(rows)).div_(next(rows))


def padded(pictures: torch.Tensor, padding: list[int], fill: Any) -> torch.Tensor:
    left, top, right, bottom = padding
    return torch.nn.functional.pad(pictures, (left, right, top, bottom), value=0)


@pytest.fixture(scope="module")
def rules() -> Any:
    """The module of the processor."""
    parts = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules: dict[str, Any] = {name: ModuleType(name) for name in parts}
    modules[parts[-1]].functional = SimpleNamespace(pad=padded)
    with patch.dict(sys.modules, modules):
        return importlib.import_module("transformers.models.llama4.image_processing_llama4")


def processed(rules: Any, image: Image.Image, most: int = 6) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the pixels of a picture's inputs, and its lines and columns."""
    kind = rules.Llama4ImageProcessor
    with_pillow = type("WithPillow", (kind,), {"resize": staticmethod(resized), "normalize": staticmethod(normed)})
    ask = methodcaller(
        "_preprocess", [torch.from_numpy(np.array(image)).permute(2, 0, 1)], do_resize=True,
        size=SizeDict(height=SIDE, width=SIDE), resample=2, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
        image_mean=[0.5] * 3, image_std=[0.5] * 3, max_patches=most, resize_to_max_canvas=False, disable_grouping=True,
        return_tensors="pt",
    )  # fmt: skip
    inputs = ask(object.__new__(with_pillow))
    lines, columns = inputs["aspect_ratios"][0].tolist()
    return inputs["pixel_values"].reshape(-1, 3, SIDE, SIDE).float(), (lines, columns)


@pytest.fixture(scope="module")
def theirs(rules: Any, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    directory, tokenizer = tmp_path_factory.mktemp("llama4"), make_tokenizer(MARKS)
    vision = {
        "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": SIDE, "patch_size": 14, "projector_input_dim": 40, "projector_output_dim": 40,
        "vision_output_dim": 40,
    }  # fmt: skip
    config = Llama4Config(
        text_config=TINY | {"vocab_size": len(tokenizer) + 5}, vision_config=vision, tie_word_embeddings=False,
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
    )  # fmt: skip
    model = Llama4ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    save_random(model, directory)
    tokenizer.save_pretrained(directory)
    settings = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6, "resample": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    images = [blurred(*size, seed) for seed, size in enumerate(SIZES)]
    text, parts = PROMPT, []
    for image in images:
        pixels, grid = processed(rules, image)
        parts.append(pixels)
        text = text.replace(MARK, Llama4Processor._prompt_split_image(None, grid, 4), 1)
    ids, pixels = tokenizer(text)["input_ids"], torch.cat(parts)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0].numpy()
    return Theirs(directory, images, ids, list(pixels.numpy()), logits, PROMPT.replace(MARK, "<|image|>"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert len(prompt.pictures) > 6
    verify_logits(theirs, prompt, backend)


def test_canvases_are_those_of_the_processor(rules: Any) -> None:
    source = random.Random(1)
    for _ in range(60):
        size, most = (source.randrange(1, 400), source.randrange(1, 400)), source.choice([1, 4, 16])
        pixels, grid = processed(rules, Image.new("RGB", size), most)
        ours = llama4(Image.new("RGB", size), Settings({"size": {"height": SIDE, "width": SIDE}, "max_patches": most}))
        assert len(ours.images) == len(pixels)
        assert (ours.lines or 1, ours.columns or 1) == grid


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_config.intermediate_size": 100}, "intermediate_size is 100, expected that of joined patches, 192"),
        ({"vision_config.num_attention_heads": 8}, "heads of 6 numbers, expected a multiple of 4"),
        ({"vision_config.image_size": 42}, "3 patches on a side, expected a multiple of 1 / pixel_shuffle_ratio, 2"),
    ],
)
def test_a_config_that_the_tower_does_not_fit_is_refused(
    theirs: Theirs, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in refusal(theirs.directory, tmp_path / "wrong", changes, caplog)
