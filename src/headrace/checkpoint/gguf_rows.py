"""Rows of a GGUF file, and the matrices that are made of them, in a form for which a backend has kernels.

Knows no names of tensors and no models. Called by `checkpoint.gguf_source` and `checkpoint.quantising`; the backend
reads the rows.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.gguf_parts import FLOATS, Part, float_rows, raw_rows
from headrace.checkpoint.reader import ResidentBytes
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError
from headrace.quant import rtn
from headrace.quant.arrays import cast, floats, type_name
from headrace.quant.base import Inputs, QWeight, concatenated, spans_of
from headrace.quant.formats import gguf_blocks
from headrace.quant.placements import MIB, MOST_HELD, cost_of
from headrace.quant.schemes import Scheme

if TYPE_CHECKING:
    from headrace.backends.base import Backend

logger = logging.getLogger(__name__)


class GGUFMatrix:
    """A `MatrixSource` over rows of blocks or floats, in the scheme among `schemes` that fits all its parts best.

    exact: blocks are dequantised into `dtype` instead. quantization: for parts that are floats. mixed: the parts have
    different schemes with the same groups of activations, and the backend cannot hold several schemes in one matrix
    (`backends.base.Backend.mixes`): all parts become floats.
    """

    columns: NDArray[np.int64] | None = None
    permutation: NDArray[np.int64] | None = None

    def __init__(
        self,
        name: str,
        parts: Sequence[Rows],
        dtype: str,
        schemes: Collection[Scheme],
        quantization: Scheme | None = None,
        exact: bool = False,
    ) -> None:
        self.name = name
        self._schemes = schemes
        self.parts = list(parts)
        self.num_in = parts[0].num_in
        self.num_out = sum(part.num_out for part in parts)
        self.inputs: Sequence[tuple[int, Inputs | None]] = [(part.num_out, None) for part in parts]
        self.kinds = {part.kind for part in parts}
        self.mixed = False
        if self.kinds & FLOATS.keys() or exact:
            self.scheme = Scheme("f", dtype=dtype)
            if quantization is not None and self.kinds <= FLOATS.keys():
                self.scheme = quantization
        else:
            self.scheme = gguf_blocks.scheme_for(self.kinds, schemes) or Scheme("f", dtype=dtype)
            each = [gguf_blocks.scheme_for({kind}, schemes) for kind in self.kinds]
            groups = {scheme.group for scheme in each if scheme is not None}
            if len(self.kinds) > 1 and len(groups) == 1 and None not in each:
                self.mixed, self.scheme = True, Scheme("f", dtype="float32")

    def slab(self, first: int, last: int) -> QWeight:
        spans = spans_of([part.num_out for part in self.parts], first, last)
        return concatenated([self._piece(self.parts[i], begin, end) for i, begin, end in spans])

    def _piece(self, part: Rows, first: int, last: int) -> QWeight:
        if self.mixed:
            alone = GGUFMatrix(self.name, [part], "", self._schemes).slab(first, last)
            return QWeight(alone.dequantize())
        if self.scheme.kind == "k":
            return gguf_blocks.k_blocks(part.kind, part.raw_rows(first, last), self.name)
        weight = part.read(first, last)
        if self.scheme.kind == "f":
            numbers = weight.codes if weight.scales is None else weight.dequantize()
            return QWeight(np.ascontiguousarray(finite(cast(numbers, self.scheme.dtype), self.name)))
        if part.kind in FLOATS:
            return rtn.quantise(weight.codes, self.scheme, self.name)
        return gguf_blocks.native(weight, part.kind, self.scheme, self.name)


class Rows:
    """Rows of one part of the file, mapped. order: for each row of the model, the index of the part's row."""

    def __init__(self, file: GGUFFile, part: Part, order: NDArray[np.int64] | None = None) -> None:
        self.file, self.kind = file, part.info.type
        self.num_out, self.num_in = part.shape
        self.part, self.raw = part, raw_rows(file.gguf, part)
        self.order = order

    def read(self, first: int, last: int) -> QWeight:
        """Return rows first ... last - 1: plain floats as they are stored, or codes with exact scales."""
        raw = self.raw_rows(first, last)
        if self.kind in FLOATS:
            return QWeight(float_rows(raw, self.kind))
        return gguf_blocks.decode(self.kind, raw)

    def raw_rows(self, first: int, last: int) -> NDArray[np.uint8]:
        self.file.about_to_read((last - first) * self.raw.shape[1])
        return self.raw[first:last] if self.order is None else self.raw[self.order[first:last]]


class Transposed(Rows):
    """The columns of a small part of the file, as rows of floats."""

    def __init__(self, file: GGUFFile, part: Part) -> None:
        super().__init__(file, part)
        whole = super().read(0, self.num_out)
        self.numbers = np.ascontiguousarray(whole.dequantize().T)
        self.kind, self.num_out, self.num_in = "F32", *self.numbers.shape

    def read(self, first: int, last: int) -> QWeight:
        return QWeight(self.numbers[first:last])


class GGUFFile:
    """A mapped file; few of its pages are in memory at a time."""

    def __init__(self, file: GGUF) -> None:
        self.gguf = file
        self._resident = ResidentBytes()

    def about_to_read(self, num_bytes: int) -> None:
        if self._resident.exceeded_by(num_bytes):
            self.release()

    def release(self) -> None:
        for data in self.gguf.files:
            if isinstance(data, mmap.mmap):
                data.madvise(mmap.MADV_DONTNEED)


class FormCounts:
    """Counts the matrices of each form, and their bytes in the file and in memory. `owner`: the name of the file."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._counts: dict[tuple[str, str], list[int]] = {}

    def add(self, kind: str, form: str, before: int, after: int) -> None:
        """Count a matrix of `kind` that runs as `form`, and its bytes."""
        entry = self._counts.setdefault((kind, form), [0, 0, 0])
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + before, entry[2] + after

    def log(self) -> None:
        for (kind, form), (num, before, after) in sorted(self._counts.items()):
            logger.info(
                "%s: %d of %s run as %s, %.1f MiB for %.1f in the file%s",
                self._owner, num, kind, form, after / MIB, before / MIB, cost_of(before, after),
            )  # fmt: skip
        wide = {key: entry for key, entry in self._counts.items() if entry[2] > MOST_HELD * entry[1]}
        if wide:
            logger.warning(
                "%s: %s take more bits here than in the file: %.1f MiB stored, %.1f MiB in memory",
                self._owner, ", ".join(sorted({kind for kind, _ in wide})),
                sum(entry[1] for entry in wide.values()) / MIB, sum(entry[2] for entry in wide.values()) / MIB,
            )  # fmt: skip


class GGUFStacks:
    """`quantising.Stacks` of a GGUF file. exact: all blocks are dequantised."""

    def __init__(self, backend: Backend, counts: FormCounts, exact: bool) -> None:
        self._backend, self._counts, self._exact = backend, counts, exact

    def forms(self, layers: Sequence[Rows]) -> list[Hashable]:
        return ["float" if self._exact or layer.kind in FLOATS else layer.kind for layer in layers]

    def piece(self, layer: Rows, first: int, last: int, transposed: bool) -> Rows:
        part = layer.part._replace(first=layer.part.first + first, shape=(last - first, layer.num_in))
        return Transposed(layer.file, part) if transposed else Rows(layer.file, part)

    def source(self, name: str, layers: list[Rows], scheme: Scheme | None, plain: bool) -> GGUFMatrix:
        exact, backend = plain or self._exact, self._backend
        source = GGUFMatrix(name, layers, backend.dtype, backend.schemes, scheme, exact)
        before = sum(layer.raw.nbytes for layer in layers)
        after = round(source.scheme.bits_per_weight(source.num_in) * source.num_in * source.num_out / 8)
        self._counts.add("+".join(sorted(source.kinds)), form_of(source.scheme), before, after)
        return source

    def log(self) -> None:
        self._counts.log()


def finite(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return `values`; raise `CheckpointError` if dequantising went beyond their dtype."""
    if not np.isfinite(floats(values)).all():
        dtype = type_name(values)
        raise CheckpointError(f"{name} has a weight that is not finite, or beyond {dtype}; try dtype float32")
    return values


def form_of(scheme: Scheme) -> str:
    """A scheme in words, for the log."""
    if scheme.kind in ("f", "k"):
        return scheme.dtype
    name = scheme.book.upper() or f"int{scheme.bits}"
    return f"{name} in groups of {scheme.group}" + " with minima" * scheme.has_min + " with zeros" * scheme.has_zero
