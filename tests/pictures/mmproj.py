"""GGUF files of small models that read pictures, written by gguf-py: the text, and the tower as mmproj file.

The names are those of gguf-py's own table, and what llama.cpp's converter does to names, rows and shapes is written
down here on its own, so that a mistake in headrace's table is not repeated.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tests.formats.gguf.models import convert

import gguf  # isort: skip

F32 = NDArray[np.float32]
TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|(?=lm_head\.)")
"""What stands before a text's names."""
TYPES = {
    str: "add_string", bool: "add_bool", int: "add_uint32", float: "add_float32", list: "add_array",
}  # fmt: skip
Names = Callable[[str], str]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}


def stored_form(name: str, tensor: torch.Tensor, form: str) -> tuple[NDArray[Any], Any, F32]:
    """Return a tower's tensor as a file of the type `form` has it, its type there, and its numbers: matrices have that
    type, but F16 where a row is no whole number of blocks; tables of places are F32."""
    weight = np.ascontiguousarray(tensor.numpy())
    if form == "F32" or weight.ndim not in (2, 4) or "position" in name:
        return weight, None, weight
    if form == "Q8_0" and weight.shape[-1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        codes = gguf.quants.quantize(weight, kind)
        return codes, kind, gguf.quants.dequantize(codes, kind)
    half = weight.astype(np.float16)
    return half, None, half.astype(np.float32)


def rounded_copy(directory: Path, to: Path, form: str) -> Path:
    """Copy a checkpoint, with the numbers that a tower's file of the type `form` has."""
    shutil.copytree(directory, to)
    stored = {}
    for name, tensor in tensors(directory).items():
        is_text = TEXT.match(name) is not None
        stored[name] = tensor if is_text else torch.from_numpy(stored_form(name, tensor, form)[2].copy())
    save_file(stored, to / "model.safetensors", {"format": "pt"})
    return to


def write_text(directory: Path, path: Path, model_type: str = "") -> Path:
    """Write the text of a checkpoint with its tokenizer and chat template."""
    config = json.loads((directory / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": False}
    text["model_type"] = model_type or text["model_type"]
    plain = path.parent / f"{path.stem}-text"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(text))
    stored = {}
    for name, tensor in tensors(directory).items():
        if TEXT.match(name) is not None:
            inner = TEXT.sub("", name, count=1)
            stored[inner if inner.startswith("lm_head.") else f"model.{inner}"] = tensor
    save_file(stored, plain / "model.safetensors", {"format": "pt"})

    def fields(writer: Any) -> None:
        add_vocabulary(writer, directory, text["vocab_size"])

    convert(plain, path, fields=fields)
    shutil.rmtree(plain)
    return path


def add_vocabulary(writer: Any, directory: Path, size: int) -> None:
    """Add the tokenizer of a folder, whose words of pictures are control tokens, and its chat template."""
    stored = json.loads((directory / "tokenizer.json").read_text())
    kinds, ids = gguf.TokenType, dict(stored["model"]["vocab"])
    special = {token["content"]: token["id"] for token in stored["added_tokens"]}
    texts = {token_id: text for text, token_id in (ids | special).items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            kinds.UNUSED if i not in texts else kinds.CONTROL if text in special else kinds.NORMAL
            for i, text in enumerate(tokens)
        ]
    )
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    )
    writer.add_add_bos_token(False)
    template = directory / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def add_field(writer: Any, key: str, value: Any) -> None:
    getattr(writer, TYPES[type(value)])(key, value)


def table_name(name: str) -> str:
    """Return gguf-py's name of a tensor of a tower."""
    if name.startswith("model.multi_modal_projector."):
        name = name.removeprefix("model.")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 9)
    for each in (name, name.removeprefix("model."), f"model.{name}"):
        result = table.get_name(each, try_suffixes=(".weight", ".bias"))
        if result is not None:
            return str(result)
    raise KeyError(name)


def paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of halves of heads, in pairs."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_tower(
    directory: Path,
    path: Path,
    kind: str,
    fields: Mapping[str, Any],
    *,
    form: str = "F32",
    names: Names = table_name,
    left: str = "",
    more: Mapping[str, F32] | None = None,
) -> Path:
    """Write the tower of a checkpoint. fields: metadata besides those of every tower, which they replace; None leaves
    one out. form: see `stored_form`. left: tensors that the converter leaves out. more: further tensors of
    the file."""
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in (metadata(config, kind) | fields).items():
        if value is not None:
            add_field(writer, key, value)
    for name, tensor in tensors(directory).items():
        if TEXT.match(name) is not None or (left and re.search(left, name)):
            continue
        if kind == "pixtral" and re.search(r"\.[qk]_proj\.", name):
            tensor = paired(tensor, vision["num_attention_heads"])
        codes, kind_of_codes, _ = stored_form(name, tensor, form)
        writer.add_tensor(names(name), codes, raw_dtype=kind_of_codes)
    for name, weight in (more or {}).items():
        writer.add_tensor(name, weight)
    if kind == "pixtral":
        writer.add_tensor("v.token_embd.img_break", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The metadata of every tower, by the converter's rules."""
    vision, keys = config["vision_config"], gguf.Keys.ClipVision
    one = {
        name: vision[name][0] if isinstance(vision[name], list) else vision[name]
        for name in ("image_size", "patch_size")
    }
    half = [0.5, 0.5, 0.5]
    return {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        gguf.Keys.Clip.PROJECTOR_TYPE: kind,
        keys.PROJECTION_DIM: config["text_config"]["hidden_size"],
        keys.IMAGE_SIZE: one["image_size"],
        keys.PATCH_SIZE: one["patch_size"],
        keys.EMBEDDING_LENGTH: vision["hidden_size"],
        keys.FEED_FORWARD_LENGTH: vision["intermediate_size"],
        keys.BLOCK_COUNT: vision["num_hidden_layers"],
        keys.Attention.HEAD_COUNT: vision["num_attention_heads"],
        keys.Attention.LAYERNORM_EPS: float(vision.get("layer_norm_eps") or 1e-5),
        keys.IMAGE_MEAN: half,
        keys.IMAGE_STD: half,
    }
