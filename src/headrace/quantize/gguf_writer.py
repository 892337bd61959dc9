"""Writes the directory of a model as one GGUF file: metadata, tokenizer, chat template, and tensors of chosen types.

A level (`LEVELS`) gives each matrix its type; the mixtures put more bits where llama.cpp's do, into the matrices of the
values and of the last projections. Rows that a type does not fit get the nearest type that does. The checkpoint is read
some rows at a time, so memory is bounded whatever the size. Called by `cli.quantize` and `quantize.mixed`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import models
from headrace.checkpoint.mapped import read_config
from headrace.checkpoint.tensors import Checkpoint
from headrace.models.config import ModelConfig
from headrace.models.rope import pair_order
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.arrays import bits_of, floats
from headrace.quantize import gguf_file, gguf_model, gguf_tokenizer
from headrace.quantize.gguf_encode import ENCODERS, encode
from headrace.quantize.gguf_file import U8, Value
from headrace.quantize.gguf_model import Planned

SLAB_WEIGHTS = 2**22
VERSION = 1
"""Changes when the same weights get other bytes: an interrupted run then begins anew."""
FITTING = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types of blocks of 32 for rows that are no whole number of blocks of 256."""
FLOATS = ("F32", "F16", "BF16")

BLOCKS = ".blocks"
"""The end of the names of tensors that are already blocks, uint8 [out, in / 32, bytes of a block]."""
BLOCK_KINDS = {18: "Q4_0", 34: "Q8_0"}

Progress = Callable[[int, int], None]


class Level(NamedTuple):
    """base: type of the matrices. head: of the head (and of a table that is tied to it). number: GGUF's file_type.

    better: type of `parts`; of a third of them in the middle and all at both ends if `some`.
    """

    base: str
    head: str
    number: int
    better: str = ""
    parts: tuple[str, ...] = ()
    some: bool = False


_VALUES = ("attn_v", "ffn_down", "ffn_down_exps")
LEVELS = {
    "F32": Level("F32", "F32", 0),
    "F16": Level("F16", "F16", 1),
    "BF16": Level("BF16", "BF16", 32),
    "Q8_0": Level("Q8_0", "Q8_0", 7),
    "Q4_0": Level("Q4_0", "Q6_K", 2),
    "Q4_1": Level("Q4_1", "Q6_K", 3),
    "Q5_0": Level("Q5_0", "Q6_K", 8),
    "Q5_1": Level("Q5_1", "Q6_K", 9),
    "Q2_K": Level("Q2_K", "Q6_K", 10, "Q3_K", (*_VALUES, "attn_output")),
    "Q3_K_S": Level("Q3_K", "Q6_K", 11),
    "Q3_K_M": Level("Q3_K", "Q6_K", 12, "Q4_K", (*_VALUES, "attn_output")),
    "Q4_K_S": Level("Q4_K", "Q6_K", 14),
    "Q4_K_M": Level("Q4_K", "Q6_K", 15, "Q6_K", _VALUES, some=True),
    "Q5_K_S": Level("Q5_K", "Q6_K", 16),
    "Q5_K_M": Level("Q5_K", "Q6_K", 17, "Q6_K", _VALUES, some=True),
    "Q6_K": Level("Q6_K", "Q6_K", 18),
}
"""By the names that llama.cpp's files have."""


class Written(NamedTuple):
    """num_bytes: of the file. bits: of a weight, all tensors and their scales counted. kinds: of each tensor."""

    num_bytes: int
    bits: float
    kinds: dict[str, str]


class Source:
    """A directory of plain floats as the tensors of a GGUF file.

    Raises `CheckpointError` for a model that GGUF cannot express, or that is quantised already.
    """

    def __init__(self, directory: Path) -> None:
        values = read_config(directory, models.names())
        if values.get("quantization_config") is not None:
            raise CheckpointError(f"{directory} is quantised already: GGUF files are made of plain floats")
        self.directory, self.config = directory, ModelConfig(values)
        self.checkpoint = Checkpoint(directory)
        stored = {re.sub(re.escape(BLOCKS) + "$", ".weight", name): name for name in self.checkpoint.names}
        self.blocks = {name: key for name, key in stored.items() if key.endswith(BLOCKS)}
        """The names in the checkpoint of tensors that are already blocks, by the names that floats would have."""
        self.metadata = gguf_model.metadata(self.config)
        head, table = self._ends()
        is_apart = head is not None and table is not None and not (self.metadata.tied and self._same(head, table))
        names = [name for name in stored if name != head or is_apart]
        plans = gguf_model.planned(names, self.metadata, str(values["model_type"]), with_head=True)
        if table is None and head is not None:
            plans.insert(0, Planned("token_embd.weight", (head,)))
        self.tied = not is_apart
        if self.tied and not self.metadata.tied:
            raise CheckpointError(f"{directory}: lm_head.weight is missing, and tie_word_embeddings is false")
        self.plans = plans

    def _ends(self) -> tuple[str | None, str | None]:
        """Return the names of the head and of the embedding table."""
        table = [name for name in self.checkpoint.names if name.rpartition("wte" if self.gpt2 else "embed_tokens")[1]]
        return ("lm_head.weight" if "lm_head.weight" in self.checkpoint.names else None, table[0] if table else None)

    @property
    def stamp(self) -> str:
        """A text of all that the tensors' bytes depend on, but for their types."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.checkpoint.files]
        return json.dumps([VERSION, files, self.config.values], sort_keys=True, default=str)

    @property
    def gpt2(self) -> bool:
        return self.metadata.architecture == "gpt2"

    def _same(self, first: str, second: str) -> bool:
        return np.array_equal(bits_of(self.checkpoint.array(first)), bits_of(self.checkpoint.array(second)))

    def shape(self, plan: Planned) -> tuple[int, ...]:
        """Return the shape of the tensor of the file, the slowest dimension first."""
        shapes = {self._shape(name) for name in plan.sources}
        if len(shapes) != 1:
            raise CheckpointError(f"{plan.name}: its parts have the shapes {sorted(shapes)}, expected one")
        # Blocks are [out, in], even where the floats are not.
        turned = plan.transposed and not self.is_blocks(plan)
        shape = tuple(reversed(shapes.pop())) if turned else shapes.pop()
        return (len(plan.sources), *shape) if plan.name.endswith("_exps.weight") else shape

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.blocks:
            return self.checkpoint.entry(name).shape
        shape = self.checkpoint.entry(self.blocks[name]).shape
        kind_of_blocks(shape, name)
        return shape[0], shape[1] * 32

    def is_blocks(self, plan: Planned) -> bool:
        return plan.sources[0] in self.blocks

    @property
    def floats(self) -> Level:
        """The level of floats whose type most of the checkpoint's bytes have."""
        entries = [self.checkpoint.entry(name) for name in self.checkpoint.names]
        sizes = {kind: sum(e.end - e.begin for e in entries if e.dtype == kind) for kind in FLOATS}
        return LEVELS[max(sizes, key=lambda kind: sizes[kind])]

    def raw(self, plan: Planned) -> Iterator[U8]:
        """Yield the bytes of a tensor that is already blocks, rows in the file's order."""
        for name in plan.sources:
            stored = self.checkpoint.array(self.blocks[name])
            rows = stored.reshape(len(stored), -1)
            yield rows[self._order(plan, len(rows))] if plan.turned else rows

    def _order(self, plan: Planned, num_rows: int) -> NDArray[np.int64]:
        return np.argsort(pair_order(num_rows, self.metadata.head_dim, plan.turned))

    def slabs(self, plan: Planned) -> Iterator[NDArray[np.float32]]:
        """Yield the tensor's numbers [rows, in], some four million at a time, rows in the file's order."""
        for name in plan.sources:
            stored = self.checkpoint.array(name)
            rows = stored.T if plan.transposed else stored.reshape(-1, 1) if stored.ndim == 1 else stored
            order = self._order(plan, len(rows)) if plan.turned else None
            step = max(SLAB_WEIGHTS // rows.shape[1], 1)
            for first in range(0, len(rows), step):
                last = min(first + step, len(rows))
                self.checkpoint.about_to_read((last - first) * rows.shape[1] * stored.itemsize)
                piece = floats(rows[first:last] if order is None else rows[order[first:last]])
                yield np.ascontiguousarray(piece + plan.offset if plan.offset else piece)

    def kinds(self, level: Level) -> dict[str, str]:
        """Return the type of each tensor by its name in the file."""
        return {plan.name: self._kind(plan, level) for plan in self.plans}

    def is_matrix(self, plan: Planned) -> bool:
        """Return whether blocks may hold it: vectors and routers are floats in every file."""
        return len(self.shape(plan)) > 1 and ".ffn_gate_inp." not in plan.name

    def _kind(self, plan: Planned, level: Level) -> str:
        if self.is_blocks(plan):
            return kind_of_blocks(self.checkpoint.entry(self.blocks[plan.sources[0]]).shape, plan.name)
        if not self.is_matrix(plan):
            return "F32"
        stem = plan.name.removesuffix(".weight")
        if stem == "position_embd":
            return level.base if level.base in FLOATS else "F16"
        kind = level.base
        if stem == "output" or (stem == "token_embd" and self.tied):
            kind = level.head
        elif stem.startswith("blk.") and stem.split(".")[2] in level.parts:
            num_layers = self.metadata.fields[f"{self.metadata.architecture}.block_count"]
            if not level.some or (isinstance(num_layers, int) and more_bits(int(stem.split(".")[1]), num_layers)):
                kind = level.better
        return fitting(kind, self.shape(plan)[-1])


def kind_of_blocks(shape: tuple[int, ...], name: str) -> str:
    """Return the type of blocks of that shape. Raises `CheckpointError` for a shape of no blocks."""
    if len(shape) != 3 or shape[2] not in BLOCK_KINDS:
        raise CheckpointError(f"{name} has blocks of shape {list(shape)}, expected [out, in / 32, 18 or 34]")
    return BLOCK_KINDS[shape[2]]


def more_bits(layer: int, num_layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or is every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def fitting(kind: str, num_in: int) -> str:
    """Return `kind`, or a type of no fewer bits if rows are no whole number of its blocks."""
    if num_in % ENCODERS[kind].elements == 0:
        return kind
    smaller = FITTING.get(kind, "F16")
    return smaller if num_in % ENCODERS[smaller].elements == 0 else "F16"


def find_level(name: str) -> Level:
    """Return the level of that name. Raises `RequestError` naming those that exist."""
    full_name = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(name.upper(), name.upper())
    if full_name not in LEVELS:
        raise RequestError("type", name, "one of " + ", ".join(LEVELS))
    return LEVELS[full_name]


def verify(source: Source) -> dict[str, Value]:
    """Return the metadata of the tokenizer. Raises `CheckpointError` for one that GGUF cannot express, and for tensors
    whose shapes a file cannot hold."""
    for plan in source.plans:
        source.shape(plan)
    return gguf_tokenizer.metadata(source.directory, source.config.integer("vocab_size"))


def convert(directory: Path, path: Path, level: str, progress: Progress | None = None) -> Written:
    """Write the model in `directory` as the GGUF file `path` of a level of `LEVELS`.

    `progress` is called with (weights written, weights in all). Raises `CheckpointError` for a model, a tokenizer or
    weights that GGUF cannot hold, `RequestError` for an unknown level; then there is no file.
    """
    mixture = find_level(level)
    source = Source(directory)
    return write(source, path, source.kinds(mixture), mixture.number, progress)


def write(
    source: Source, path: Path, kinds: Mapping[str, str], number: int | None = None, progress: Progress | None = None
) -> Written:
    """As `convert`, with the type of each tensor. number: GGUF's file_type, if the mixture has one."""
    metadata = source.metadata
    fields: dict[str, Value] = {"general.architecture": metadata.architecture, "general.type": "model"}
    fields |= {"general.name": source.directory.resolve().name, "general.quantization_version": 2}
    fields |= {} if number is None else {"general.file_type": number}
    fields |= metadata.fields | verify(source)
    tensors = [gguf_file.Tensor(plan.name, kinds[plan.name], source.shape(plan)) for plan in source.plans]
    if metadata.factors is not None:
        tensors.append(gguf_file.Tensor("rope_freqs.weight", "F32", metadata.factors.shape))
    total = sum(math.prod(tensor.shape) for tensor in tensors)

    def data(first: int) -> Iterator[tuple[int, U8]]:
        num_written = sum(math.prod(tensor.shape) for tensor in tensors[:first])
        for index, plan in list(enumerate(source.plans))[first:]:
            if source.is_blocks(plan):
                yield from ((index, piece) for piece in source.raw(plan))
                num_written += math.prod(tensors[index].shape)
                continue
            for piece in source.slabs(plan):
                yield index, encode(kinds[plan.name], piece, plan.name)
                num_written += piece.size
                if progress is not None:
                    progress(num_written, total)
        if metadata.factors is not None and first <= len(source.plans):
            yield len(source.plans), encode("F32", metadata.factors[None], "rope_freqs.weight")
        source.checkpoint.release()

    gguf_file.write(path, fields, tensors, data, source.stamp)
    bits = 8 * sum(tensor.num_bytes for tensor in tensors) / total
    return Written(path.stat().st_size, bits, {tensor.name: tensor.kind for tensor in tensors})
