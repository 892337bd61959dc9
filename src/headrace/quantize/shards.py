"""Writes safetensors files and the small files around them, each whole or not at all.

A file is written under a temporary name and renamed when it is complete, so that a run that is killed leaves only whole
files. Bytes depend on names and numbers alone. Called by `quantize.driver` and by the writers of Hugging Face layouts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoint.mapped import VIEWS
from headrace.quant.arrays import type_name

INDEX = "model.safetensors.index.json"
NAMES = {dtype.names[0] if dtype.names else dtype.name: name for name, dtype in VIEWS.items() if name != "F8_E8M0"}
"""The name in a file of each type."""
ALIGNMENT = 8


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Tensors may be views of a mapping; none is copied."""
    # The widest first, so that each begins at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        size = tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": NAMES[type_name(tensors[name])],
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + size],
        }
        end += size
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(_head(header))
        for name in order:
            if tensors[name].numel():
                file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def merge(directory: Path, files: Sequence[str], target: str) -> None:
    """Write the tensors of several safetensors files into one, as `write` does, and leave the files."""
    places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in files:
        with (directory / file).open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        places |= {name: (directory / file, 8 + size, entry) for name, entry in header.items()}

    def width(name: str) -> float:
        num_values: int = math.prod(places[name][2]["shape"])
        begin, end = map(int, places[name][2]["data_offsets"])
        return (end - begin) / max(1, num_values)

    order = sorted(places, key=lambda name: (-width(name), name))
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, stop = places[name][2]["data_offsets"]
        head[name] = places[name][2] | {"data_offsets": [end, end + stop - begin]}
        end += stop - begin
    partial = (directory / target).with_name(f"{target}.partial")
    with partial.open("wb") as merged:
        merged.write(_head(head))
        for name in order:
            path, start, entry = places[name]
            begin, stop = entry["data_offsets"]
            with path.open("rb") as source:
                source.seek(start + begin)
                merged.write(source.read(stop - begin))
        merged.flush()
        os.fsync(merged.fileno())
    partial.replace(directory / target)


def _head(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_json(path: Path, values: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def finish(directory: Path, files: Mapping[str, Sequence[str]], config: dict[str, Any]) -> None:
    """Write config.json and the index. files: names of tensors by file."""
    weight_map = {name: file for file, names in files.items() for name in names}
    size = sum((directory / file).stat().st_size for file in files)
    write_json(
        directory / INDEX,
        {"metadata": {"total_size": size}, "weight_map": {name: weight_map[name] for name in sorted(weight_map)}},
    )
    write_json(directory / "config.json", config)
