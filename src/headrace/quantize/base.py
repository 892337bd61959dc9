"""The interface of quantisation methods and checkpoint writers: a layer's working set, options, and two protocols.

A method is one file `quantize/methods/<name>.py`: it turns one weight into codes, and may first move scales between the
neighbours in a decoder layer. A writer is one file `quantize/writers/<name>.py`: it lays codes out in a checkpoint.
Knows no files and no models. Called by `quantize.driver`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight, Tensors
from headrace.quantize import methods, writers

ActOrder = Literal["none", "static", "group"]

AFFINE = ("rtn", "gptq", "awq", "smoothquant", "hqq", "qat")
"""Methods whose codes are whole numbers with a scale and a whole zero point for each group."""

TRAINED = ("qat",)
"""Methods that train the whole model before its layers are written."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options of a method. The `verify` of each method and writer refuses values that it does not take.

    num_steps, learning_rate, seed, bfloat16: of training; a rate of 0 is the usual one of the bits.
    group_size: inputs that share a scale; -1 one scale for each output, 0 one for the matrix. follows_widths: lower
    group_size, for all layers, to a power of two that divides the inputs of each. symmetric: codes without zero points,
    None for the method's default. scale_dtype: of scales as stored, to which they are rounded before codes
    are chosen by them (the driver takes it from the writer).
    """

    method: str = "rtn"
    bits: int = 4
    group_size: int = 128
    follows_widths: bool = False
    symmetric: bool | None = None
    act_order: ActOrder = "static"
    damping: float = 0.01
    clip: bool = True
    alpha: float = 0.5
    num_steps: int = 120
    learning_rate: float = 0.0
    seed: int = 0
    bfloat16: bool = False
    scale_dtype: torch.dtype = torch.float16


class Statistics:
    """Statistics of a linear layer's inputs x [rows, in] on the calibration text.

    num_rows: rows seen. hessian: float32 [in, in], the mean of x x^T (0 before the first row). mean_abs, max_abs:
    float32 [in].
    """

    def __init__(self, num_in: int) -> None:
        self.num_rows = 0
        self.hessian = torch.zeros(num_in, num_in)
        self.mean_abs = torch.zeros(num_in)
        self.max_abs = torch.zeros(num_in)

    def add(self, x: Tensor) -> None:
        """Add rows [n, in]."""
        if not len(x):
            return
        x = x.float()
        total = self.num_rows + len(x)
        share = self.num_rows / total
        self.hessian.mul_(share).addmm_(x.t(), x, alpha=1 / total)
        self.mean_abs.mul_(share).add_(x.abs().sum(0) / total)
        self.max_abs = torch.maximum(self.max_abs, x.abs().amax(0))
        self.num_rows = total

    def divided(self, scales: Tensor) -> Statistics:
        """Return the statistics of inputs x / scales [in]."""
        statistics = Statistics(0)
        statistics.num_rows = self.num_rows
        statistics.hessian = self.hessian / scales.unsqueeze(0) / scales.unsqueeze(1)
        statistics.mean_abs, statistics.max_abs = self.mean_abs / scales, self.max_abs / scales
        return statistics


@dataclass(slots=True)
class Fold:
    """Neighbours between which scales can move: the outputs of `before` (a norm or a linear layer) feed `after`.

    index: int64 [in of after], the output of `before` that each input comes from.
    """

    before: str
    after: list[str]
    index: Tensor


@dataclass(slots=True)
class Layer:
    """One decoder layer's working set, by name (without ".weight"). Methods may change all of it but the statistics'
    numbers; the driver writes it as they leave it.

    weights: float32 [out, in] of the layers to quantise. biases: float32 [out]. norms: float32 [size], and offsets: the
    number that a norm adds to its weight. stored: the dtype in which norms and biases are written. statistics: of the
    inputs of each weight; empty where there was no calibration. folds: in the order of the computation.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    stored: torch.dtype = torch.float32
    statistics: dict[str, Statistics] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)


class Method(Protocol):
    """A module `quantize/methods/<name>.py`."""

    CALIBRATED: bool
    """Whether it needs statistics of the layers' inputs."""

    def verify(self, options: Options) -> Options:
        """Return the options with defaults filled in. Raises `RequestError` for values that it does not take."""
        ...

    def prepare(self, layer: Layer, options: Options) -> None:
        """Change a layer before its weights are quantised one by one. Most methods do nothing."""
        ...

    def quantise(self, weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
        """float32 [out, in] as codes. Affine codes are uint8 0 ... 2^bits - 1 with whole zero points in `zeros` (the
        middle where they are symmetric), whatever the number of bits; writers shift them. Raises `CheckpointError`.
        """
        ...


class LayerShape(NamedTuple):
    """A linear layer to quantise. transposed: the plain checkpoint has it as [in, out] (GPT-2's Conv1D)."""

    num_out: int
    num_in: int
    transposed: bool = False


class Writer(Protocol):
    """A module `quantize/writers/<name>.py`."""

    def verify(self, options: Options) -> None:
        """Raises `RequestError` for options that the layout cannot hold."""
        ...

    def verify_model(self, source: Path, layers: Mapping[str, LayerShape], options: Options) -> None:
        """Raises `CheckpointError` for a model (the directory `source`) that the layout cannot hold with these
        options, so that `tensors` and `finish` do not fail hours later."""
        ...

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Of the stored scales, for a model of that dtype."""
        ...

    def tensors(self, name: str, weight: QWeight, options: Options) -> dict[str, Tensor]:
        """The tensors to store for the linear layer `name`. Raises `CheckpointError` for shapes that do not fit."""
        ...

    def quantization_config(self, options: Options, plain_layers: Sequence[str]) -> dict[str, Any]:
        """Return config.json's quantization_config."""
        ...

    def read(self, tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
        """Read back the result of `tensors`; `config` is the result of `quantization_config`."""
        ...

    def finish(self, directory: Path, files: Mapping[str, Sequence[str]], config: dict[str, Any]) -> None:
        """Complete the directory after the last layer. files: names of tensors by file; config: config.json with its
        quantization_config. Hugging Face layouts use `shards.finish`."""
        ...


def refuse_transposed(layout: str, layers: Mapping[str, LayerShape]) -> None:
    """Raises `CheckpointError` for layers [in, out], which readers of `layout` do not support."""
    for name, shape in layers.items():
        if shape.transposed:
            raise CheckpointError(
                f"{name}.weight is stored [in, out]; {layout} has no such layers, the formats gptq, bitsandbytes and "
                "gguf have"
            )


def method_names() -> list[str]:
    return sorted(info.name for info in pkgutil.iter_modules(methods.__path__))


def writer_names() -> list[str]:
    """Return the names on the command line, with hyphens."""
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(writers.__path__))


def find_method(name: str) -> Method:
    """Raises `RequestError` naming those that exist."""
    method: Method = _find("method", name, method_names(), methods)
    return method


def find_writer(name: str) -> Writer:
    """Raises `RequestError` naming those that exist."""
    writer: Writer = _find("format", name, writer_names(), writers)
    return writer


def _find(field: str, name: str, names: list[str], package: ModuleType) -> Any:
    if name not in names:
        raise RequestError(field, name, "one of " + ", ".join(names))
    return importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
