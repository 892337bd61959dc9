"""Tiny checkpoints of Qwen's models that read pictures, written by transformers, and what that makes of them."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tests.support.harness import make_batch, scattered_tables
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import headrace.builtin
from headrace.backends.step import Chunks
from headrace.models.towers.rows import normalised
from headrace.protocol.pictures import Picture
from headrace.runner.pictures import picture_rows, places_of
from headrace.runner.pieces import Piece
from headrace.runner.runner import Runner
from headrace.text.pictures.forms import read_form
from headrace.text.pictures.reading import PictureReader
from headrace.text.tokenizer import Tokenizer

TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PROMPT = "user: Look at {0} and {0} here:\n{0} What is it, and what are the others?\nassistant:".format(
    "<|vision_start|><|image_pad|><|vision_end|>"
)
SIZES = (131, 77), (40, 90), (210, 64)
"""Widths and heights of the pictures."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "rope_parameters": ROPE | {"mrope_section": [6, 5, 5]},
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 8,
    "num_position_embeddings": 36,
    "out_hidden_size": 64,
}
DELTA = {
    "rope_parameters": ROPE | {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}


class Family(NamedTuple):
    """The names of transformers' classes, the settings of the tiny model, and the scale of its weights: by chunks,
    transformers computes a delta rule of large numbers with errors that the layers behind it make larger."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    scale: float = 1.2


WINDOWS = {"hidden_act": "silu", "window_size": 48, "fullatt_block_indexes": [1, 4], "depth": 5}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}}
FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VL", TEXT | SECTIONS | {"hidden_size": 128}, VISION | WINDOWS | {"out_hidden_size": 128}
    ),
    "qwen3_vl": Family("Qwen3VL", TEXT, VISION | {"deepstack_visual_indexes": [1, 0]}),
    "qwen3_5": Family("Qwen3_5", TEXT | DELTA, VISION, 0.5),
    "qwen3_vl_moe": Family("Qwen3VLMoe", TEXT | EXPERTS, VISION | {"deepstack_visual_indexes": [0, 2]}),
    "qwen3_5_moe": Family("Qwen3_5Moe", TEXT | DELTA | EXPERTS | {"shared_expert_intermediate_size": 40}, VISION, 0.5),
}


F32 = NDArray[np.float32]


class Oracle(NamedTuple):
    """What transformers makes of `PROMPT` with the pictures. pixels: of the patches, as its processor orders them.
    token_ids: of the prompt, and the ones that it then takes for the likeliest. logits [R, V]: of all of them, in
    float32."""

    directory: Path
    pictures: list[Image.Image]
    pixels: F32
    token_ids: list[int]
    num_prompt: int
    logits: F32


def picture(width: int, height: int, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = (rng.random((height // 8 + 1, width // 8 + 1, 3)) * 255).astype("uint8")
    return Image.fromarray(coarse).resize((width, height), 3)


def write(directory: Path, family: str, num_new: int = 6) -> Oracle:
    """Write a checkpoint with random weights to `directory`, and compute the prompt with transformers."""
    names = FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(next(Path(headrace.builtin.__file__).parent.rglob("tokenizer.json")))
    )
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(("vision_start", "vision_end", "image", "video"), TOKENS, strict=True)
    }
    text = names.text | {"vocab_size": len(tokenizer) + 5}
    config = getattr(transformers, f"{names.name}Config")(
        text_config=text, vision_config=names.vision, tie_word_embeddings=False, **ids
    )
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    scatter(model, names.scale)
    model.save_pretrained(directory)
    cutter = Qwen2VLImageProcessorPil(
        patch_size=8,
        size={"shortest_edge": 40 * 100, "longest_edge": 90 * 100},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = make_processor(cutter, tokenizer)
    cutter.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    inputs = processor(images=pictures, text=PROMPT, return_tensors="pt")
    with torch.inference_mode():
        token_ids = model.generate(**inputs, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)[0]
        num_prompt = inputs["input_ids"].shape[1]
        types = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, num_new))
        whole = inputs | {
            "input_ids": token_ids[None],
            "attention_mask": torch.ones_like(token_ids[None]),
            "mm_token_type_ids": types,
        }
        logits = model(**whole).logits[0].numpy()
    pixels = inputs["pixel_values"].numpy()
    return Oracle(directory, pictures, pixels, token_ids.tolist(), num_prompt, logits)


def scatter(model: torch.nn.Module, scale: float) -> None:
    """Give all weights random numbers, of a size at which every part counts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 and "norm" not in name:
                width = parameter.shape[-1] if parameter.dim() < 4 else parameter[0].numel()
                parameter.copy_(noise * scale / math.sqrt(width))
            else:
                parameter.copy_(parameter + 0.2 * noise)


def make_processor(cutter: Any, tokenizer: Any) -> Any:
    """Return transformers' processor without the part for videos, which needs torchvision."""
    processor = object.__new__(Qwen3VLProcessor)
    processor.check_argument_for_proper_class = lambda *_: None
    Qwen3VLProcessor.__init__(processor, cutter, tokenizer, object())
    return processor


class Prompt(NamedTuple):
    """headrace's reading of `PROMPT` with the pictures."""

    token_ids: list[int]
    pictures: list[Picture]


def read(oracle: Oracle) -> Prompt:
    tokenizer = Tokenizer.load(oracle.directory)
    form = read_form(oracle.directory, tokenizer)
    assert form is not None
    reader = PictureReader(form)
    cuts = []
    for image in oracle.pictures:
        file = io.BytesIO()
        image.save(file, "PNG")
        cuts.append(reader.cut(file.getvalue(), "messages"))
    token_ids = tokenizer.encode(reader.text(PROMPT, cuts))
    row_id = tokenizer.token_to_id(form.words.token)
    assert row_id is not None
    return Prompt(token_ids, reader.place(token_ids, row_id, cuts))


def pixels_of(picture: Picture, norm: Any) -> F32:
    """The numbers of a picture's pixels [height, width, 3]."""
    return normalised(np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3), norm)


def follow(
    runner: Runner, token_ids: list[int], pictures: list[Picture], cuts: Sequence[int] = (), *, turns: bool = True
) -> F32:
    """Logits at every position of one sequence, computed in chunks that begin at 0 and at `cuts`, over scattered
    blocks, beside another sequence. turns: whether rows turn by the positions of pictures."""
    program, source, out = runner.program, runner.pictures, []
    assert source is not None
    other = token_ids[:5][::-1]
    tables = scattered_tables([len(token_ids), len(other)], runner.block_size, program.num_blocks, 1)
    has_state, begins = program.kinds[-1].is_state, [0, *cuts]
    for turn, (begin, end) in enumerate(zip(begins, [*cuts, len(token_ids)], strict=True)):
        pieces = [Piece(1, 0, other, tables[1]), Piece(0, begin, token_ids[begin:end], tables[0])]
        batch = make_batch([(0, begin, [0], tables[0]), (1, 0, [0], tables[1])], pictures={0: pictures})
        size, first = end - begin, len(other)
        states: dict[str, Any] = {"states_in": [-1, (turn - 1) % 2 if turn else -1]}
        states["states_out"] = [(first - 1, 2), (first + size - 1, turn % 2)]
        chunks = Chunks(
            [piece.start for piece in pieces],
            [piece.token_ids for piece in pieces],
            [piece.table for piece in pieces],
            later=range(first, first + size),
            places=places_of(batch, pieces, source) if turns else None,
            **(states if has_state else {}),
        )
        program.forward(chunks, [], picture_rows(batch, pieces, source))
        rows = list(range(first, first + size))
        out += [program.logits(rows[i : i + 8]).fetch().copy() for i in range(0, size, 8)]
    return np.concatenate(out)
