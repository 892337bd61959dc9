"""`QWeight`: the one form in which weights, quantised or not, pass from checkpoint formats to backends.

A checkpoint format is one file `quant/<quant_method>.py` with a function `read` (see `Format`). A backend takes the
QWeight of some rows at a time from a `MatrixSource`, so that no large matrix is ever whole in a wider form, and packs
it for its kernels or calls `dequantize`. Knows no files, no models, no kernels. Called by the readers of checkpoints
and by the backends.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, Array, floats, joined, looked_up, repeated, type_name
from headrace.quant.schemes import LEVELS, Kind, Scheme, find_method

PANEL = 32
"""Rows that a backend packs together: slabs begin at multiples of it."""
MOST_ZERO = 15
"""Of codes of 2 and 3 bits: a zero is 4 bits."""
SLAB_WEIGHTS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Inputs:
    """The numbers to which a checkpoint's method rounds a layer's inputs before the product: E4M3 times a scale.

    scale: of all inputs; None for the largest of each row, or of each `group` of its inputs, over E4M3's largest.
    """

    scale: float | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class QWeight:
    """A matrix [out, in]:
    w[o, permutation[j]] = (codebook[codes[o, j]] - zeros[o, g]) * scales[o, g] + mins[o, g], g = j // group.

    codes: integers or 8-bit floats [out, in], or the weights themselves if `scales` is None.
    scales: float32 [out, ceil(in / group)]. zeros (in units of codes) and mins: the same shape, or None for 0.
    group: inputs that share a scale. bits: of one code as stored. permutation: int64 [in], or None for the identity.
    codebook: float32 [n], n > any code, or None where a code is itself the value.
    inputs: the numbers to which the method rounds the inputs; None if it does not, or where the checkpoint does not
    say.
    """

    codes: Array
    scales: Array | None = None
    zeros: Array | None = None
    mins: Array | None = None
    group: int = 0
    bits: int = 32
    permutation: Array | None = None
    codebook: Array | None = None
    inputs: Inputs | None = None

    def __post_init__(self) -> None:
        if len(self.codes.shape) != 2:
            raise CheckpointError(f"codes have shape {list(self.codes.shape)}, expected [out, in]")
        if self.scales is None:
            others = (self.zeros, self.mins, self.permutation, self.codebook)
            if any(part is not None for part in others) or type_name(self.codes) not in PLAIN:
                raise CheckpointError(f"a weight without scales must be plain floats, not {type_name(self.codes)}")
            return
        if self.group < 1:
            raise CheckpointError(f"group is {self.group}, expected at least 1")
        expected = (self.codes.shape[0], -(-self.codes.shape[1] // self.group))
        for name, part in (("scales", self.scales), ("zeros", self.zeros), ("mins", self.mins)):
            if part is not None and tuple(part.shape) != expected:
                raise CheckpointError(f"{name} have shape {list(part.shape)}, expected {list(expected)}")
        if self.permutation is not None and tuple(self.permutation.shape) != (self.codes.shape[1],):
            raise CheckpointError(f"permutation has shape {list(self.permutation.shape)}, expected one entry per input")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, first: int, last: int) -> QWeight:
        """Rows first ... last - 1, without a copy."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "mins")}
        return replace(self, **{name: part[first:last] for name, part in parts.items() if part is not None})

    def ordered(self, order: Array) -> QWeight:
        """The rows `order`, copied."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "mins")}
        return replace(self, **{name: part[order] for name, part in parts.items() if part is not None})

    def dequantize(self) -> Array:
        """The weights as float32 [out, in], inputs in the model's order; one rounding for each operation."""
        if self.scales is None:
            return floats(self.codes)
        weight = floats(self.codes) if self.codebook is None else looked_up(self.codebook, self.codes)
        if self.zeros is not None:
            weight = weight - self._wide(self.zeros)
        weight = weight * self._wide(self.scales)
        if self.mins is not None:
            weight += self._wide(self.mins)
        return weight if self.permutation is None else weight[:, self.permutation.argsort()]

    def _wide(self, part: Array) -> Array:
        return widened(floats(part), self.group, self.codes.shape[1])


@dataclass(frozen=True, slots=True)
class SplitWeight(QWeight):
    """Codes for all inputs, and for some inputs weights of 16 bits that replace them (LLM.int8()).

    columns: int64 [n] inputs. kept: bfloat16 [out, n], their weights.
    """

    columns: Array | None = None
    kept: Array | None = None

    def rows(self, first: int, last: int) -> SplitWeight:
        # A dataclass with slots is created twice, which breaks super() without arguments.
        rows: SplitWeight = QWeight.rows(self, first, last)  # type: ignore[assignment]
        return rows if self.kept is None else replace(rows, kept=self.kept[first:last])

    def dequantize(self) -> Array:
        weight = QWeight.dequantize(self)
        if self.columns is not None and self.kept is not None:
            weight[:, self.columns] = floats(self.kept)
        return weight


def widened(part: Array, group: int, num_in: int) -> Array:
    """[out, groups] as [out, in], or as a column if there is one group only."""
    return part if part.shape[1] == 1 else repeated(part, group)[:, :num_in]


class MatrixSource(Protocol):
    """One linear layer's weights [num_out, num_in], of which any rows can be read, in any order and repeatedly."""

    @property
    def name(self) -> str:
        """Of the stacked layers in the checkpoint: "model.layers.0.self_attn.q_proj+k_proj+v_proj"."""
        ...

    @property
    def num_out(self) -> int: ...

    @property
    def num_in(self) -> int: ...

    @property
    def scheme(self) -> Scheme:
        """The form of the rows that `slab` returns."""
        ...

    @property
    def columns(self) -> NDArray[np.int64] | None:
        """int64 [n]: inputs whose weights have 16 bits in addition to the codes of all (`SplitWeight`); None for
        none."""
        ...

    @property
    def inputs(self) -> Sequence[tuple[int, Inputs | None]]:
        """(outputs, rounding of their inputs) of the stacked layers; empty where no checkpoint says it."""
        ...

    @property
    def permutation(self) -> NDArray[np.int64] | None:
        """int64 [num_in]: the permutation of every `slab`, as `QWeight` has it (act-order); None for the model's
        order."""
        ...

    def slab(self, first: int, last: int) -> QWeight:
        """Rows first ... last - 1. Raises `CheckpointError` for weights that `scheme` cannot hold."""
        ...


def slabs(source: MatrixSource) -> Iterator[tuple[int, int]]:
    """(first, last) row of pieces of some 4 M weights that begin at multiples of PANEL."""
    step = max(SLAB_WEIGHTS // source.num_in // PANEL, 1) * PANEL
    for first in range(0, source.num_out, step):
        yield first, min(first + step, source.num_out)


class Stacked:
    """The rows of several weights [out, in], one after the other. All must have one scheme if `scheme` is None."""

    columns: Array | None = None
    permutation: Array | None = None

    def __init__(self, name: str, parts: Sequence[QWeight], scheme: Scheme | None = None) -> None:
        self.name = name
        self.parts = list(parts)
        self.num_in = parts[0].shape[1]
        self.num_out = sum(part.shape[0] for part in parts)
        self.inputs = [(part.shape[0], part.inputs) for part in parts]
        schemes = {scheme_of(part) for part in parts} if scheme is None else {scheme}
        if len(schemes) > 1 and any(scheme.kind != "f" for scheme in schemes):
            raise CheckpointError(f"{name}: its parts are quantised differently")
        self.scheme = schemes.pop() if len(schemes) == 1 else Scheme("f", dtype="float32")

    def slab(self, first: int, last: int) -> QWeight:
        pieces = self.pieces(first, last)
        if self.scheme.kind == "f" and any(piece.scales is not None for piece in pieces):
            pieces = [QWeight(piece.dequantize()) for piece in pieces]
        return concatenated(pieces)

    def pieces(self, first: int, last: int) -> list[QWeight]:
        """Rows first ... last - 1 as views of the parts that hold them."""
        spans = spans_of([part.shape[0] for part in self.parts], first, last)
        return [self.parts[i].rows(begin, end) for i, begin, end in spans]


def spans_of(num_rows: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(part, its first row, its last row + 1) of rows first ... last - 1, where parts of `num_rows` are stacked."""
    start = 0
    for part, num in enumerate(num_rows):
        begin, end = max(first - start, 0), min(last - start, num)
        if begin < end:
            yield part, begin, end
        start += num


def source_of(weights: Sequence[QWeight], name: str = "") -> Stacked:
    """Weights in memory as a `MatrixSource`."""
    return Stacked(name, weights)


def scheme_of(weight: QWeight) -> Scheme:
    """The form of a weight; kind f for all that `Scheme` has no codes for."""
    if weight.scales is None:
        dtype = type_name(weight.codes)
        return Scheme("f", dtype="float32" if dtype == "float64" else dtype)
    if type_name(weight.codes).startswith("float") or weight.permutation is not None or isinstance(weight, SplitWeight):
        return Scheme("f", dtype="float32")
    if weight.codebook is not None:
        entries = (
            np.asarray(weight.codebook, np.float32) if weight.zeros is None and weight.mins is None else np.empty(0)
        )
        book = next((name for name, book in LEVELS.items() if np.array_equal(entries, np.array(book, np.float32))), "")
        return Scheme("i4", weight.group, book=book) if book and weight.bits == 4 else Scheme("f", dtype="float32")
    if weight.bits in (2, 3) and weight.mins is None and weight.zeros is not None:
        scheme = Scheme("i2" if weight.bits == 2 else "i3", weight.group)
        if bool((weight.zeros == scheme.middle).all()):
            return scheme
        if bool(((weight.zeros >= 0) & (weight.zeros <= MOST_ZERO) & (weight.zeros % 1 == 0)).all()):
            return scheme._replace(has_zero=True)
    if weight.bits in (4, 5, 6):
        kind: Kind = "i4" if weight.bits == 4 else "i5" if weight.bits == 5 else "i6"
        if weight.mins is not None and weight.zeros is None:
            return Scheme(kind, weight.group, True)
        scheme = Scheme(kind, weight.group)
        if weight.mins is None and weight.zeros is not None and bool((weight.zeros == scheme.middle).all()):
            return scheme
    if weight.bits == 8 and weight.zeros is None and type_name(weight.codes) == "int8":
        if weight.mins is not None:
            return Scheme("i8", weight.group, True)
        return Scheme("i8", 0 if weight.scales.shape[1] == 1 else weight.group)
    return Scheme("f", dtype="float32")


def concatenated(weights: Sequence[QWeight]) -> QWeight:
    """Weights of one form, stacked along their outputs."""
    first = weights[0]
    if len(weights) == 1:
        return first
    names = ["codes", "scales", "zeros", "mins"] + ["kept"] * isinstance(first, SplitWeight)
    stacked: dict[str, Any] = {}
    for name in names:
        parts = [getattr(weight, name) for weight in weights]
        stacked[name] = None if parts[0] is None else joined(parts)
    return replace(first, **stacked)


class Tensors(Protocol):
    """A checkpoint as a format reads it."""

    def __call__(self, name: str) -> NDArray[Any]:
        """Map a tensor, read-only, and mark it as used. Raises `CheckpointError` if there is none."""
        ...

    def has(self, name: str) -> bool: ...

    def notes(self, name: str) -> Mapping[str, str]:
        """The texts that the metadata of the tensor's file have."""
        ...


class Format(Protocol):
    """A module `quant/<quant_method>.py`; a hyphen of the method's name is an underscore of the module's."""

    SPARE: re.Pattern[str]
    """Names of tensors that writers of the format store and headrace does not need (scales of activations)."""

    # A format may have a function `activations` as well: see `stated_activations`.

    def read(self, tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
        """The weight of the linear layer `name` (without ".weight"); `config` is config.json's quantization_config.

        Raises `CheckpointError` naming tensor, shape and the expected ones.
        """
        ...


def find_format(config: Any) -> Format:
    """The format that config.json's `quantization_config` names; plain weights if there is none.

    Raises `CheckpointError` naming a method that headrace does not read.
    """
    method = find_method(config)
    module = f"headrace.quant.formats.{method.replace('-', '_')}"
    if re.fullmatch(r"[a-z][a-z0-9_-]*", method) and importlib.util.find_spec(module) is not None:
        layout: Format = importlib.import_module(module)
        if hasattr(layout, "read"):
            return layout
    folder = importlib.import_module("headrace.quant.formats").__path__
    modules = [each.name for each in pkgutil.iter_modules(folder) if not each.name.startswith(("gguf", "none"))]
    names = ", ".join(name.replace("_", "-") for name in modules)
    place = config.get("stated_in", "quantization_config")
    raise CheckpointError(
        f"{place}: quant_method {method!r:.80} is not supported; take the model unquantised, as GGUF, or one of {names}"
    )


def stated_activations(config: Any) -> str:
    """The activations with which the checkpoint's own method multiplies, by config.json's `quantization_config`:
    "16bit" where only these keep the method's loss, "fp8", "int8 by row", or "" where headrace measures it. Raises as
    `find_format`."""
    rule = getattr(find_format(config), "activations", None)
    return "" if rule is None or config is None else str(rule(config))
