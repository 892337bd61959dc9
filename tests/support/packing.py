"""A backend that packs in the simplest way, so that packed files can be tested without the native kernels; and what the
tests of packed files do with it: save, find, load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import models
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.checkpoint.packed import Form, PackedFile, PackedWriter, find
from headrace.checkpoint.packed_weights import PackedWeights
from headrace.checkpoint.quantising import Loading
from headrace.checkpoint.tensors import Checkpoint
from headrace.models.config import ModelConfig
from headrace.quant.arrays import floats, type_name
from headrace.quant.base import slabs
from headrace.quant.schemes import F8_SCHEMES, SCHEMES, Scheme, parse

KINDS = ("i4", "i6", "i8", "f8", "f")


@dataclass
class ToyMatrix:
    """`packed` is codes, scales and minimums, or the weights, one after the other."""

    name: str
    scheme: Scheme
    packed: NDArray[np.uint8]
    num_in: int
    num_out: int
    bias: Any = None
    permutation: Any = None


class ToyOps:
    def __init__(self) -> None:
        self.slabs: list[tuple[int, int]] = []

    def matrix(self, source: Any, bias: Any = None) -> ToyMatrix:
        scheme, num_groups = source.scheme, -(-source.num_in // (source.scheme.group or source.num_in))
        size = packed_bytes(scheme, source.num_out, source.num_in)
        out = np.zeros(size, np.uint8)
        item = 1 if scheme.kind != "f" else 4 if scheme.dtype == "float32" else 2
        at = source.num_out * source.num_in * item
        for first, last in slabs(source):
            self.slabs.append((first, last))
            slab = source.slab(first, last)
            begin, end = first * source.num_in * item, last * source.num_in * item
            out[begin:end] = np.ascontiguousarray(slab.codes).reshape(-1).view(np.uint8)
            for i, part in enumerate((slab.scales, slab.mins)):
                if part is not None:
                    start = at + 4 * num_groups * (i * source.num_out + first)
                    out[start : start + 4 * part.size] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        return ToyMatrix(source.name, scheme, out, source.num_in, source.num_out, bias)

    def packed(self, matrix: Any) -> ToyMatrix:
        return ToyMatrix(matrix.name, matrix.scheme, matrix.data, matrix.num_in, matrix.num_out, matrix.bias)


def packed_bytes(scheme: Scheme, num_out: int, num_in: int) -> int:
    if scheme.kind == "f":
        return num_out * num_in * (4 if scheme.dtype == "float32" else 2)
    num_groups = -(-num_in // (scheme.group or num_in))
    return num_out * num_in + 4 * num_out * num_groups * (1 + scheme.has_min)


class ToyBackend:
    name = "toy"
    device = "cpu"
    schemes = SCHEMES | F8_SCHEMES
    mixes = False
    sees_wholes = False

    def keep_losses(self, path: Path, max_model_len: int, may_write: bool) -> None:
        """Nothing is measured."""

    def __init__(self, dtype: str = "float32", version: str = "1") -> None:
        self.dtype = dtype
        self.ops = ToyOps()
        self.version = version
        self.packed_bytes = packed_bytes

    def layouts(self) -> dict[str, str]:
        return {kind: f"toy/{kind}/{self.version}" for kind in KINDS}

    def constant(self, values: Any, is_weight: bool = False) -> NDArray[np.float32]:
        return np.array(floats(values), np.float32)

    def table(self, values: Any) -> tuple[str, Any]:
        return type_name(values), values.tobytes()


def form_of(backend: ToyBackend, quantization: str | None) -> Form:
    return Form(quantization or "", backend.dtype, backend.layouts())


def make_model(directory: Path, weights: Any, backend: Any) -> Any:
    values = json.loads((directory / "config.json").read_text())
    model = models.find(values["model_type"]).Model(ModelConfig(values), weights, backend.ops, 128)
    weights.finish()
    return model


def load(directory: Path, quantization: str | None = None, backend: Any = None, writer: Any = None) -> Any:
    backend = backend or ToyBackend()
    expected = None if quantization is None else parse(quantization)
    weights = SafetensorsWeights(Checkpoint(directory), backend, None, Loading(quantization=expected, writer=writer))
    return make_model(directory, weights, backend)


def save(directory: Path, quantization: str | None = "int4", backend: Any = None) -> Path:
    backend = backend or ToyBackend()
    with PackedWriter(MappedCheckpoint(directory), form_of(backend, quantization)) as writer:
        load(directory, quantization, backend, writer)
    assert writer.path is not None
    return writer.path


def found(directory: Path, quantization: str | None = "int4", backend: Any = None) -> PackedFile | None:
    backend = backend or ToyBackend()
    return find(MappedCheckpoint(directory), form_of(backend, quantization), backend)


def mapped(directory: Path, quantization: str | None = "int4") -> Any:
    backend, checkpoint = ToyBackend(), MappedCheckpoint(directory)
    file = find(checkpoint, form_of(backend, quantization), backend)
    assert file is not None
    return make_model(directory, PackedWeights(file, checkpoint, backend), backend)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Everything a model holds that came from the weights, by where it is."""
    if isinstance(value, np.ndarray | bytes | str):
        return {path: value.tobytes() if isinstance(value, np.ndarray) else value}
    if hasattr(value, "packed") and hasattr(value, "num_out"):
        shape = (value.scheme, value.num_in, value.num_out)
        bias = None if value.bias is None else value.bias.tobytes()
        return {path: (shape, value.packed.tobytes(), bias)}
    if isinstance(value, list | tuple):
        return {k: v for i, x in enumerate(value) for k, v in leaves(x, f"{path}.{i}").items()}
    if type(value).__module__.startswith("headrace.models") and not path.endswith(".decoder"):
        return {k: v for n, x in vars(value).items() if n not in SHARED for k, v in leaves(x, f"{path}.{n}").items()}
    return {}


SHARED = ("decoder", "weights", "config", "ops", "heads", "cache_shapes", "kinds", "_windowed")


def tiny(directory: Path, model_type: str) -> Path:
    """A checkpoint of a model's TINY config, with biases, experts, tied embeddings and whatever else it has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    values = dict(models.find(model_type).TINY)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(directory)
    return directory
