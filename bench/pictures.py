"""`python -m bench.pictures`: the time of a tower, beside transformers, on random weights of SmolVLM-256M's shape.

A photo of 1,024 x 768 pixels is asked about, which the processor cuts into 13 tiles of 512 x 512. Prints seconds a tile
(the median), of the first answer, and of a second question about the same photo.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table

import headrace.builtin
from headrace import LLM, SamplingParams

THEIRS: Any = transformers
TILES = [f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7)]
WORDS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES]
TEXT = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "pad_token_id": 0,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49280, "max_position_embeddings": 8192,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip


def write(directory: Path) -> Any:
    """Write the checkpoint in bfloat16, and return transformers' model."""
    path = Path(headrace.builtin.__file__).parent / "tokenizer.json"
    tokenizer = THEIRS.PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS})
    config = THEIRS.Idefics3Config(
        text_config=TEXT, vision_config=VISION, scale_factor=4, tie_word_embeddings=False, pad_token_id=0,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    model = THEIRS.Idefics3ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(directory)
    settings = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(directory)
    return model


def ours(directory: Path, **settings: Any) -> list[float]:
    """Return the seconds of a tile, of the first answer and of the second."""
    photo = Image.fromarray((np.random.default_rng(0).random((768, 1024, 3)) * 255).astype("uint8"))
    llm = LLM(str(directory), **settings)
    engine: Any = llm.core.executor
    times: list[float] = []
    features = engine.pictures.features

    def timed(picture: Any) -> Any:
        num, begin = engine.pictures.num_computed, time.perf_counter()
        result = features(picture)
        if engine.pictures.num_computed > num:
            times.append(time.perf_counter() - begin)
        return result

    engine.pictures.features = timed
    answers = []
    for question in ("What is in <image>?", "And what else is in <image>?"):
        begin = time.perf_counter()
        prompt = {"prompt": question, "multi_modal_data": {"image": photo}}
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        answers.append(time.perf_counter() - begin)
    llm.close()
    return [statistics.median(times), *answers]


def theirs(model: Any, dtype: torch.dtype) -> float:
    """Return transformers' seconds of a tile, the median of five runs of four."""
    tiles, model, times = torch.randn(1, 4, 3, 512, 512, dtype=dtype), model.to(dtype), []
    with torch.inference_mode():
        for _ in range(5):
            begin = time.perf_counter()
            model.model.get_image_features(tiles)
            times.append((time.perf_counter() - begin) / 4)
    return statistics.median(times)


def main() -> None:
    table = Table(title="SmolVLM-256M's shape, seconds", caption=f"{torch.get_num_threads()} threads")
    for name in ("", "a tile", "first answer", "second question"):
        table.add_column(name, justify="right" if name else "left")
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder))
        for name, settings in (("headrace, int8", {"quantization": "int8"}), ("headrace, as stored", {})):
            table.add_row(name, *(f"{seconds:.2f}" for seconds in ours(Path(folder), **settings)))
    for dtype in (torch.float32, torch.bfloat16):
        table.add_row(f"transformers, {str(dtype).partition('.')[2]}", f"{theirs(model, dtype):.2f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
