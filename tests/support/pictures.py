"""Tiny random checkpoints of models that read pictures, the answers of transformers' own processor and model, and a way
to read the same prompt with headrace.

Used by tests/pictures, one file for each family.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.support.harness import load, make_batch, scattered_tables
from transformers import PreTrainedTokenizerFast
from transformers.models.pixtral import image_processing_pil_pixtral

import headrace.builtin
from headrace.backends.step import Chunks
from headrace.models.towers.rows import normalised
from headrace.protocol.pictures import Picture, wholes_of
from headrace.runner.pictures import picture_rows, whole_rows
from headrace.runner.pieces import Piece
from headrace.runner.runner import Runner
from headrace.text.pictures.forms import norm_of, read_form
from headrace.text.pictures.reading import PictureReader
from headrace.text.tokenizer import Tokenizer

F32 = NDArray[np.float32]
SIZES = ((131, 77), (40, 90), (64, 64))
"""Widths and heights of three pictures."""
MARK = "<mark>"
"""Where a picture stands in `PROMPT`."""
PROMPT = f"user: Look at {MARK} and {MARK} here: {MARK} What is it?\nassistant:"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip


def make_tokenizer(words: Sequence[str], **options: Any) -> Any:
    """A tokenizer of transformers with further special tokens."""
    [path] = Path(headrace.builtin.__file__).parent.rglob("tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), **options)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words)})
    return tokenizer


def blurred(width: int, height: int, seed: int) -> Image.Image:
    """A picture of soft spots."""
    numbers = np.random.default_rng(seed).random((height // 8 + 1, width // 8 + 1, 3))
    return Image.fromarray((numbers * 255).astype("uint8")).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def save_random(model: Any, directory: Path) -> Any:
    """Give a model of transformers lively random weights, write it, and return it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.2 / math.sqrt(parameter[0].numel()))
            else:
                parameter.copy_(parameter + 0.2 * noise)
    model.eval().save_pretrained(directory)
    return model


def without_video(kind: type) -> Any:
    """Return a class of processors that needs no torchvision, which is for the parts that read videos."""
    parts = classmethod(lambda cls: ["image_processor", "tokenizer"])
    return type(kind.__name__, (kind,), {"get_attributes": parts})


def pixtral_processor() -> Any:
    """Return transformers' class of Pixtral's processor. Its module needs torchvision, for a function that the one for
    Pillow has too."""
    names = [f"transformers.models.pixtral.{name}" for name in ("image_processing_pixtral", "processing_pixtral")]
    stand_in = {} if importlib.util.find_spec("torchvision") else {names[0]: image_processing_pil_pixtral}
    with patch.dict(sys.modules, stand_in):
        return importlib.import_module(names[1]).PixtralProcessor


class Theirs(NamedTuple):
    """The answers of transformers for `PROMPT` with three pictures: token ids, the pixels [3, height, width] of each
    input of the tower, and the logits [R, V]."""

    directory: Path
    images: list[Image.Image]
    token_ids: list[int]
    pixels: list[F32]
    logits: F32
    prompt: str


def answers(directory: Path, model: Any, processor: Any, mark: str) -> Theirs:
    """Write the processor beside its model, and ask both."""
    processor.save_pretrained(directory)
    images = [blurred(*size, seed) for seed, size in enumerate(SIZES)]
    prompt = PROMPT.replace(MARK, mark)
    inputs = processor(images=images, text=prompt, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**inputs).logits[0].numpy()
    pixels = inputs["pixel_values"].numpy()
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    if "image_sizes" in inputs:
        pixels = [each[:, :height, :width] for each, (height, width) in zip(pixels, inputs["image_sizes"], strict=True)]
    return Theirs(directory, images, inputs["input_ids"][0].tolist(), list(pixels), logits, prompt)


class Prompt(NamedTuple):
    """A prompt as headrace reads it; `token_ids` of the whole."""

    token_ids: list[int]
    pictures: list[Picture]


class Ours:
    """headrace's reading of prompts for the model in a directory."""

    def __init__(self, directory: Path, projector: Path | None = None) -> None:
        """projector: the GGUF file of its tower, if it is apart."""
        self.tokenizer = Tokenizer.load(directory)
        form = read_form(directory, self.tokenizer, projector)
        assert form is not None
        self.form, self.reader = form, PictureReader(form)

    def read(self, prompt: str, images: Sequence[Image.Image], start: Sequence[int] = ()) -> Prompt:
        """Read a prompt. start: tokens that come before it."""
        cuts = [self.reader.cut(png(image), "messages") for image in images]
        token_ids = [*start, *self.tokenizer.encode(self.reader.text(prompt, cuts), add_special_tokens=False)]
        row_id = self.tokenizer.token_to_id(self.form.words.token)
        assert row_id is not None
        return Prompt(token_ids, self.reader.place(token_ids, row_id, cuts))

    def pixels(self, picture: Picture) -> F32:
        """Return the numbers [3, height, width] that the tower reads."""
        numbers = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
        return normalised(numbers, norm_of(self.form.settings, self.form.family)).transpose(2, 0, 1)

    def close(self) -> None:
        self.reader.process.close()


def logits_of(runner: Runner, prompts: Sequence[Prompt], sizes: Sequence[int]) -> list[F32]:
    """Return the logits [R, V] of each prompt. All are computed side by side over scattered blocks, in chunks whose
    lengths are `sizes` in turn, each up to the end of a picture that it would cut where that is seen whole."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    tables = scattered_tables(lengths, runner.block_size, runner.program.num_blocks, 1)
    outs: list[list[F32]] = [[] for _ in prompts]
    wholes = [whole for prompt in prompts for whole in wholes_of(prompt.pictures)]
    for start, stop in spans(max(lengths), sizes, wholes):
        live = [i for i, length in enumerate(lengths) if length > start]
        pieces = [
            Piece(c, start, prompts[i].token_ids[start:stop], tables[i], wholes=wholes_of(prompts[i].pictures))
            for c, i in enumerate(live)
        ]
        chunks = [(i, start, piece.token_ids, piece.table) for i, piece in zip(live, pieces, strict=True)]
        batch = make_batch(chunks, pictures={c: prompts[i].pictures for c, i in enumerate(live)})
        assert runner.pictures is not None
        features = picture_rows(batch, pieces, runner.pictures)
        ids = [piece.token_ids for piece in pieces]
        chunks_read = Chunks(batch.starts, ids, batch.block_tables, wholes=whole_rows(pieces)).all_read()
        finite, _ = runner.program.forward(chunks_read, [], features)
        assert all(finite)
        at = 0
        for i, piece in zip(live, pieces, strict=True):
            for first, last in spans(len(piece.token_ids), [runner.program.max_logits]):
                outs[i].append(runner.program.logits(list(range(at + first, at + last))).fetch().copy())
            at += len(piece.token_ids)
    return [np.concatenate(parts) for parts in outs]


def spans(length: int, sizes: Sequence[int], wholes: Sequence[tuple[int, int]] = ()) -> Iterator[tuple[int, int]]:
    """Cut `length` by a repeated pattern of sizes, but inside none of `wholes`: (first, stop) of each piece."""
    start, turn = 0, 0
    while start < length:
        stop = min(start + sizes[turn % len(sizes)], length)
        stop = max([stop, *(end for first, end in wholes if first < stop < end)])
        yield start, stop
        start, turn = stop, turn + 1


def verify_reading(theirs: Theirs) -> Prompt:
    """Assert that headrace's pixels and token ids are those of the processor, and return its prompt."""
    ours = Ours(theirs.directory)
    try:
        unlike = ours.tokenizer.encode("", add_special_tokens=True)
        prompt = ours.read(theirs.prompt, theirs.images, unlike if theirs.token_ids[: len(unlike)] == unlike else ())
        assert prompt.token_ids == theirs.token_ids
        assert len(prompt.pictures) == len(theirs.pixels)
        for picture, pixels in zip(prompt.pictures, theirs.pixels, strict=True):
            np.testing.assert_allclose(ours.pixels(picture), pixels, atol=1e-5, rtol=0)
    finally:
        ours.close()
    return prompt


def verify_logits(theirs: Theirs, prompt: Prompt, backend: str) -> None:
    """Assert that a backend's logits are those of transformers; that they have the same bits however the prompt is cut
    and whatever is beside it; and that the rows of the pictures matter, each in its place."""
    runner = load(theirs.directory, backend=backend)
    text = Prompt(prompt.token_ids[:9], [])
    odd = prompt.pictures[-1].spans[0][0] + 1  # in the middle of the last picture
    whole, beside = logits_of(runner, [prompt, text], [512])
    np.testing.assert_allclose(whole, theirs.logits, atol=1e-4, rtol=0)
    for sizes in ([7, 13], [odd, 1, 512]):
        [cut] = logits_of(runner, [prompt], sizes)
        np.testing.assert_array_equal(cut, whole)
    first, second = logits_of(runner, [text, prompt], [5, 17])
    np.testing.assert_array_equal(first, beside)
    np.testing.assert_array_equal(second, whole)
    for wrong in wrong_pictures(prompt.pictures):
        [other] = logits_of(runner, [prompt._replace(pictures=wrong)], [512])
        assert abs(other[-1] - theirs.logits[-1]).max() > 1e-2
    runner.program.close()
    if runner.pictures is not None:
        runner.pictures.close()


def wrong_pictures(pictures: list[Picture]) -> list[list[Picture]]:
    """Return other pictures: the pixels of the first one turned upside down; its first row one place later, where the
    others of its rows were; none at all."""
    first, *rest = pictures
    lines = np.frombuffer(first.pixels, np.uint8).reshape(first.height, -1)
    turned = Picture(f"turned {first.digest}", lines[::-1].tobytes(), first.height, first.width, first.spans)
    (at, num), *spans = first.spans
    moved = Picture(first.digest, first.pixels, first.height, first.width, [(at + 1, num), *spans])
    return [[turned, *rest], [moved, *rest], []]


def refusal(directory: Path, to: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """Return why pictures are refused by a model whose config.json has `changes`: a value for each name, such as
    "vision_config.hidden_act"."""
    shutil.copytree(directory, to)
    path = to / "config.json"
    values = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        inner = values
        for part in outer:
            inner = inner[part]
        inner[last] = value
    path.write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        runner = load(to)
    assert runner.pictures is None
    runner.program.close()
    [message] = [record.getMessage() for record in caplog.records if "pictures are refused" in record.getMessage()]
    return message
