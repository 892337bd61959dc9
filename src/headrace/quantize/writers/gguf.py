"""Codes of the methods as GGUF blocks: symmetric ones of up to 4 bits as Q4_0, of 8 bits as Q8_0, to the bit.

The file has the codes that a method chose, with GPTQ's and AWQ's gains. (The types that `quantize.gguf_encode` chooses
codes for, the K-quants among them, are written by `quantize.gguf_writer`.) During the run layers are stored in
safetensors; `finish` turns them into one .gguf file with the name of the directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats import gguf_blocks
from headrace.quantize import gguf_writer, shards
from headrace.quantize.base import LayerShape, Options

BLOCK = 32


def verify(options: Options) -> None:
    """Raises `RequestError` for codes that no block can hold unchanged."""
    if options.method in ("nf4", "llm_int8", "fp8", "fp8_e5m2", "mxfp4") or not options.symmetric:
        text = options.method + ("" if options.symmetric else " with zero points")
        raise RequestError("format", "gguf", f"another for {text}: it holds symmetric codes of 2, 3, 4 or 8 bits")
    if options.bits not in (2, 3, 4, 8) or (options.group_size > 0 and options.group_size % BLOCK):
        raise RequestError("group_size", options.group_size, f"a multiple of {BLOCK} for format gguf, or -1 or 0")
    if options.method == "gptq" and options.act_order == "group":
        raise RequestError("act_order", "group", "static or none for format gguf, whose groups are of neighbours")


def verify_model(source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
    gguf_writer.verify(gguf_writer.Source(source))
    for name, shape in layers.items():
        if shape.num_in % BLOCK:
            raise CheckpointError(f"{name} has {shape.num_in} inputs; GGUF's blocks want rows of {BLOCK}s")


def scale_dtype(model_dtype: torch.dtype) -> torch.dtype:
    return torch.float16


def tensors(name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
    num_out, num_in = weight.shape
    if weight.scales is None or weight.zeros is None or weight.permutation is not None:
        raise CheckpointError(f"{name}: GGUF's blocks want symmetric codes in groups of neighbours")
    middle = 2 ** (options.bits - 1)
    codes = (weight.codes.to(torch.int16) - middle).view(num_out, -1, BLOCK)
    scales = weight.scales.repeat_interleave(min(weight.group, num_in) // BLOCK, 1).half().unsqueeze(-1)
    heads = scales.view(torch.uint8)
    if options.bits == 8:
        blocks = torch.cat((heads, codes.to(torch.int8).view(torch.uint8)), 2)
    else:
        moved = (codes + 8).to(torch.uint8)
        blocks = torch.cat((heads, moved[..., :16] | moved[..., 16:] << 4), 2)
    return {f"{name}{gguf_writer.BLOCKS}": blocks}


def quantization_config(options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": "gguf"}


def read(source: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    blocks = source(f"{name}{gguf_writer.BLOCKS}")
    raw = np.ascontiguousarray(blocks.reshape(len(blocks), -1))
    return gguf_blocks.decode(gguf_writer.kind_of_blocks(tuple(blocks.shape), name), raw)


def finish(directory: Path, files: Mapping[str, Sequence[str]], config: dict[str, Any]) -> None:
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    shards.finish(directory, files, plain)
    source = gguf_writer.Source(directory)
    gguf_writer.write(source, directory / f"{directory.resolve().name}.gguf", source.kinds(source.floats))
    # A directory without config.json means the one GGUF file in it.
    for name in ("config.json", shards.INDEX, *files):
        (directory / name).unlink()
