"""A tiny random Idefics3 with a chat template, for tests of pictures in chats; pictures as clients send them."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.support.pictures import LLAMA, make_tokenizer, png, save_random
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

TILES = [f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7)]
WORDS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}assistant:"
)


def write(directory: Path) -> tuple[Any, Any]:
    """Write the checkpoint with its processor, and return transformers' model and processor."""
    tokenizer = make_tokenizer(WORDS)
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
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    save_random(model, directory)
    processor.save_pretrained(directory)
    return model, processor


@functools.cache
def noisy(seed: int, width: int = 96, height: int = 60) -> Image.Image:
    """A picture of noise."""
    return Image.fromarray((np.random.default_rng(seed).random((height, width, 3)) * 255).astype("uint8"))


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The file of a picture in one of Pillow's forms."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
