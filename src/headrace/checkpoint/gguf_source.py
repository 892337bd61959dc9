"""Reads the weights of a GGUF file: mapped, some rows at a time.

Matrices keep their codes where the backend has kernels for them, and get the nearest form where it has not; which form
they get is logged, with its bytes. Rows of q and k, which ggml stores in pairs, are reordered into halves. Norms are
floats, tables floats or mapped blocks. Knows no requests. Called by `engine.library.load`.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.gguf_keys import Reading
from headrace.checkpoint.gguf_parts import FLOATS, Part, float_rows, raw_rows
from headrace.checkpoint.mapped import stacked_name
from headrace.checkpoint.quantising import QuantisingReader
from headrace.checkpoint.reader import Progress, ResidentBytes
from headrace.gguf import GGUF
from headrace.models.rope import pair_order
from headrace.models.weights import ByHead
from headrace.protocol.errors import CheckpointError
from headrace.quant import rtn
from headrace.quant.arrays import blocks_of, cast, floats, type_name
from headrace.quant.base import Inputs, QWeight, concatenated, spans_of
from headrace.quant.formats import gguf_blocks
from headrace.quant.placements import MIB, cost_of
from headrace.quant.schemes import K_TYPES, Quantization, Scheme

if TYPE_CHECKING:
    from headrace.backends.base import Array, Backend, Matrix
    from headrace.checkpoint.packed import PackedWriter

logger = logging.getLogger(__name__)

TABLE_ROWS_WEIGHTS = 2**22
"""Weights of a table that are read at once."""


class GGUFMatrix:
    """A `MatrixSource` over rows of blocks or floats, in the one of `schemes` that fits all its parts best.

    exact: blocks are dequantised into `dtype` instead. quantization: for parts that are floats. mixed: the parts have
    different schemes, for which activations are quantised in the same groups, on a backend that can not hold several
    (`backends.base.Backend.mixes`); together they are floats.
    """

    columns: NDArray[np.int64] | None = None
    inputs: Sequence[tuple[int, Inputs | None]] = ()
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
    """Rows of one part of the file, mapped. order: for each row of the model its place among the part's rows."""

    def __init__(self, file: GGUFFile, part: Part, order: NDArray[np.int64] | None = None) -> None:
        self.file, self.kind = file, part.info.type
        self.num_out, self.num_in = part.shape
        self.part, self.raw = part, raw_rows(file.gguf, part)
        self.order = order

    def read(self, first: int, last: int) -> QWeight:
        """Rows first ... last - 1: plain floats as they are stored, or codes with exact scales."""
        raw = self.raw_rows(first, last)
        if self.kind in FLOATS:
            return QWeight(float_rows(raw, self.kind))
        return gguf_blocks.decode(self.kind, raw)

    def raw_rows(self, first: int, last: int) -> NDArray[np.uint8]:
        self.file.about_to_read((last - first) * self.raw.shape[1])
        return self.raw[first:last] if self.order is None else self.raw[self.order[first:last]]


class Transposed(Rows):
    """Columns of a small part of the file as rows of floats."""

    def __init__(self, file: GGUFFile, part: Part) -> None:
        super().__init__(file, part)
        whole = super().read(0, self.num_out)
        self.numbers = np.ascontiguousarray(whole.dequantize().T)
        self.kind, self.num_out, self.num_in = "F32", *self.numbers.shape

    def read(self, first: int, last: int) -> QWeight:
        return QWeight(self.numbers[first:last])


class GGUFFile:
    """A mapped file, of which little is in memory at a time."""

    def __init__(self, file: GGUF) -> None:
        self.gguf = file
        self._resident = ResidentBytes()

    def about_to_read(self, num_bytes: int) -> None:
        if self._resident.exceeded_by(num_bytes):
            self.release()

    def release(self) -> None:
        if isinstance(self.gguf.data, mmap.mmap):
            self.gguf.data.madvise(mmap.MADV_DONTNEED)


class GGUFWeights(QuantisingReader["Rows"]):
    """A GGUF file as `models.weights.Weights`, for one model.

    Args:
        exact: dequantise all blocks into the backend's dtype.
        The others are those of `QuantisingReader`; `quantization` is for matrices that the file has as floats.
    """

    def __init__(
        self,
        file: GGUF,
        reading: Reading,
        backend: Backend,
        on_tensor: Progress | None = None,
        quantization: Quantization | None = None,
        exact: bool = False,
        writer: PackedWriter | None = None,
    ) -> None:
        super().__init__(file.name, reading.parts, backend, on_tensor, quantization, writer)
        self._file = GGUFFile(file)
        self._reading = reading
        self._exact = exact
        self._forms: dict[tuple[str, str], list[int]] = {}
        for name, part in reading.parts.items():
            kind = part.info.type
            if kind not in FLOATS and kind not in gguf_blocks.TYPES:
                raise file.fault(f"type of {name}", kind, "one of floats and blocks")
            if quantization is not None and kind not in FLOATS:
                raise CheckpointError(
                    f"{self._owner} is quantised already ({name} is {kind}); load it without quantization "
                    f"{quantization.name!r}"
                )

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        """As `Weights.table`: floats stay mapped, as do blocks that the backend can look up; others become floats."""
        rows = Rows(self._file, self._part(name, shape))
        if rows.kind in FLOATS:
            return self._backend.table(rows.read(0, rows.num_out).codes)
        if rows.kind in self._backend.block_tables and not self._exact:
            step = max(TABLE_ROWS_WEIGHTS // rows.num_in, 1)
            for first in range(0, rows.num_out, step):
                gguf_blocks.check_scales(rows.kind, rows.raw_rows(first, min(first + step, rows.num_out)), name)
            self._count_form(rows.kind, f"{rows.kind} (table, mapped)", rows.raw.nbytes, rows.raw.nbytes)
            return self._backend.table(blocks_of(rows.raw, rows.kind, K_TYPES[rows.kind].size))
        table = self.floats(name, shape)
        if self._writer is not None:
            self._writer.table(name, table)
        return self._backend.table(table)

    def floats(self, name: str, shape: tuple[int, int]) -> NDArray[Any]:
        """A table of blocks in the model's dtype, made on all cores: a packed start waits for little else."""
        rows = Rows(self._file, self._part(name, shape))
        step = max(TABLE_ROWS_WEIGHTS // rows.num_in, 1)

        def piece(first: int) -> NDArray[Any]:
            weight = rows.read(first, min(first + step, rows.num_out)).dequantize()
            return finite(cast(weight, self._backend.dtype), name)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            table = np.concatenate(list(threads.map(piece, range(0, rows.num_out, step))))
        self._count_form(rows.kind, f"{self._backend.dtype} (table)", rows.raw.nbytes, table.nbytes)
        return table

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        first = f"{embedding}.weight"
        table = self.table(first, shape)
        rows = Rows(self._file, self._part(first if tied else f"{head}.weight", shape))
        return table, self._matrix([head], [rows], self._head_scheme(), None, plain=False)

    def finish(self) -> None:
        super().finish()
        self._file.release()
        for (kind, form), (num, before, after) in sorted(self._forms.items()):
            logger.info(
                "%s: %d of %s run as %s, %.1f MiB for %.1f in the file%s",
                self._owner, num, kind, form, after / MIB, before / MIB, cost_of(before, after),
            )  # fmt: skip

    def _layer(self, name: str, num_out: int, num_in: int, transposed: bool) -> Rows:
        # The file has every matrix as [out, in], so `transposed` changes nothing.
        return Rows(self._file, self._part(f"{name}.weight", (num_out, num_in)), self._order(name, num_out))

    def by_head(self, name: str, num_in: int, num_heads: int, turned: int, straight: int) -> ByHead:
        names = [ByHead.names(name, head) for head in range(num_heads)]
        if not self.has(names[0][0] + ".weight"):
            return super().by_head(name, num_in, num_heads, turned, straight)
        # Files of today have the two apart, and the one transposed.
        return ByHead(
            [self.linear([first], turned, [num_in]) for first, _ in names],
            [self.linear([second], num_in, [straight]) for _, second in names],
        )

    def _piece(self, layer: Rows, first: int, last: int, transposed: bool) -> Rows:
        part = layer.part._replace(first=layer.part.first + first, shape=(last - first, layer.num_in))
        return Transposed(self._file, part) if transposed else Rows(self._file, part)

    def _ordered(self, layer: Rows, order: NDArray[np.int64]) -> Rows:
        # Else the file's converter put the rows in the model's order, or `_order` does.
        return Rows(self._file, layer.part, order) if self._reading.reorders else layer

    def _ordered_bias(self, bias: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
        return bias[order] if self._reading.reorders else bias

    def _matrix(
        self, names: Sequence[str], layers: list[Rows], scheme: Scheme | None, bias: NDArray[Any] | None, plain: bool
    ) -> Matrix:
        exact, backend = plain or self._exact, self._backend
        if not exact:
            forms = ["float" if layer.kind in FLOATS else layer.kind for layer in layers]
            num_outs = [layer.num_out for layer in layers]
            if (matrix := self._runs(names, layers, num_outs, forms, scheme, bias)) is not None:
                return matrix
        source = GGUFMatrix(stacked_name(names), layers, backend.dtype, backend.schemes, scheme, exact)
        before = sum(layer.raw.nbytes for layer in layers)
        after = round(source.scheme.bits_per_weight(source.num_in) * source.num_in * source.num_out / 8)
        self._count_form("+".join(sorted(source.kinds)), form_of(source.scheme), before, after)
        return self._make(source, bias)

    def _count_form(self, kind: str, form: str, before: int, after: int) -> None:
        """Count a matrix of `kind` that runs as `form`, and its bytes in the file and in memory."""
        entry = self._forms.setdefault((kind, form), [0, 0, 0])
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + before, entry[2] + after

    def _order(self, name: str, num_rows: int) -> NDArray[np.int64] | None:
        """Where the rows of q and k are: ggml's pairs (2i, 2i + 1) of a head are (i, i + half) for the model."""
        if not self._reading.turned or not name.endswith((".q_proj", ".k_proj")):
            return None
        return pair_order(num_rows, self._reading.values["head_dim"], self._reading.turned)

    def _small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        values = self._vector(name, shape)
        has_offset = name.endswith(self._reading.offset_ends) and not name.endswith("linear_attn.norm.weight")
        offset = self._reading.norm_offset if has_offset else 0.0
        return values - offset if offset else values

    def _bias(self, name: str, size: int) -> NDArray[Any]:
        values = self._vector(f"{name}.bias", (size,))
        order = self._order(name, size)
        return values if order is None else values[order]

    def _vector(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A small tensor of floats; all but two of its dimensions may be 1."""
        part = self._part(name, shape)
        if part.info.type not in FLOATS or len(shape) - shape.count(1) > 2:
            raise CheckpointError(
                f"{self._owner}: {name} is {part.info.type} of {len(shape)} dimensions, expected floats"
            )
        num_rows = math.prod(shape[:-1])
        rows = Rows(self._file, part._replace(shape=(num_rows, shape[-1])))
        values: NDArray[Any] = rows.read(0, num_rows).dequantize().reshape(shape).copy()
        return values

    def _part(self, name: str, shape: tuple[int, ...]) -> Part:
        part = self._reading.parts.get(name)
        if part is None:
            raise CheckpointError(f"{self._owner}: {name} is missing")
        if part.shape != shape:
            raise CheckpointError(
                f"{self._owner}: {name} has shape {list(part.shape)}, the metadata make it {list(shape)}"
            )
        self._take(name)
        return part


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
    return f"{name} in groups of {scheme.group}" + (" with minima" if scheme.has_min else "")
