"""Reads the weights of a GGUF file: mapped, some rows at a time.

Matrices keep their codes where the backend has kernels for them, and get the nearest form where it has not; the forms
are logged, with their bytes. Rows of q and k, which ggml stores in pairs, are reordered into halves. Norms are
floats, tables floats or mapped blocks. Knows no requests. Called by `engine.library.load`.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.gguf_keys import Reading
from headrace.checkpoint.gguf_parts import FLOATS, Part
from headrace.checkpoint.gguf_rows import FormCounts, GGUFFile, GGUFStacks, Rows, finite
from headrace.checkpoint.quantising import Loading, QuantisingReader, verify_kernels
from headrace.checkpoint.reader import Parts, Progress
from headrace.gguf import GGUF
from headrace.models.rope import pair_order
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import blocks_of, cast, floats
from headrace.quant.formats import gguf_blocks
from headrace.quant.schemes import K_TYPES, Quantization

if TYPE_CHECKING:
    from headrace.backends.base import Backend

TABLE_ROWS_WEIGHTS = 2**22
"""Most weights of a table that are read at once."""


class GGUFFormat:
    """`quantising.Format` of a GGUF file. exact: tables of blocks are dequantised into the backend's dtype."""

    def __init__(
        self, file: GGUF, reading: Reading, backend: Backend, exact: bool = False, on_tensor: Progress | None = None
    ) -> None:
        self.owner, self.parts = file.name, Parts(reading.parts, on_tensor)
        self.counts = FormCounts(self.owner)
        self._file, self._reading, self._backend, self._exact = GGUFFile(file), reading, backend, exact

    def layers(self, linear: Linear) -> list[Rows]:
        layers = []
        for name, num_out, order in linear.layers():
            # The file has every matrix as [out, in], so `transposed` changes nothing.
            part = self._part(f"{name}.weight", (num_out, linear.num_in))
            # Else the file's converter has put the rows into the model's order, or `_order` does it here.
            is_reordered = order is not None and self._reading.reorders
            layers.append(Rows(self._file, part, order if is_reordered else self._order(name, num_out)))
        return layers

    def bias(self, linear: Linear) -> NDArray[np.float32]:
        biases = []
        for name, num_out, order in linear.layers():
            values = floats(self._vector(f"{name}.bias", (num_out,)))
            stored = self._order(name, num_out)
            values = values if stored is None else values[stored]
            biases.append(values[order] if order is not None and self._reading.reorders else values)
        return np.concatenate(biases)

    def table(self, name: str, shape: tuple[int, int]) -> tuple[NDArray[Any], bool]:
        """As `Format.table`: floats stay mapped, as do blocks that the backend can look up; others become floats."""
        rows = Rows(self._file, self._part(name, shape))
        if rows.kind in FLOATS:
            return rows.read(0, rows.num_out).codes, False
        if rows.kind not in self._backend.block_tables or self._exact:
            return self.floats(name, shape), True
        step = max(TABLE_ROWS_WEIGHTS // rows.num_in, 1)
        for first in range(0, rows.num_out, step):
            gguf_blocks.check_scales(rows.kind, rows.raw_rows(first, min(first + step, rows.num_out)), name)
        self.counts.add(rows.kind, f"{rows.kind} (table, mapped)", rows.raw.nbytes, rows.raw.nbytes)
        return blocks_of(rows.raw, rows.kind, K_TYPES[rows.kind].size), False

    def floats(self, name: str, shape: tuple[int, int]) -> NDArray[Any]:
        """Return a table of blocks in the model's dtype. All cores compute it: it is most of the time of a packed
        start."""
        rows = Rows(self._file, self._part(name, shape))
        step = max(TABLE_ROWS_WEIGHTS // rows.num_in, 1)

        def piece(first: int) -> NDArray[Any]:
            weight = rows.read(first, min(first + step, rows.num_out)).dequantize()
            return finite(cast(weight, self._backend.dtype), name)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            table = np.concatenate(list(threads.map(piece, range(0, rows.num_out, step))))
        self.counts.add(rows.kind, f"{self._backend.dtype} (table)", rows.raw.nbytes, table.nbytes)
        return table

    def ends(self, embedding: str, head: str, tied: bool) -> tuple[str, bool]:
        return f"{embedding}.weight", tied

    def tied_head(self, name: str, shape: tuple[int, int]) -> Rows:
        return Rows(self._file, self._part(name, shape))

    def is_spare(self, name: str) -> bool:
        return False

    def is_empty(self, name: str) -> bool:
        return 0 in self._reading.parts[name].shape

    def release(self) -> None:
        self._file.release()

    def _order(self, name: str, num_rows: int) -> NDArray[np.int64] | None:
        """Return the order of q's or k's rows: ggml's pairs (2i, 2i + 1) of a head are (i, i + half) for the model."""
        if not self._reading.turned or not name.endswith((".q_proj", ".k_proj")):
            return None
        return pair_order(num_rows, self._reading.values["head_dim"], self._reading.turned)

    def small(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        values = self._vector(name, shape)
        has_offset = name.endswith(self._reading.offset_ends) and not name.endswith("linear_attn.norm.weight")
        offset = self._reading.norm_offset if has_offset else 0.0
        return values - offset if offset else values

    def _vector(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a small tensor of floats; all but two of its dimensions may be 1."""
        part = self._part(name, shape)
        if part.info.type not in FLOATS or len(shape) - shape.count(1) > 2:
            raise CheckpointError(
                f"{self.owner}: {name} is {part.info.type} of {len(shape)} dimensions, expected floats"
            )
        num_rows = math.prod(shape[:-1])
        rows = Rows(self._file, part._replace(shape=(num_rows, shape[-1])))
        values: NDArray[Any] = rows.read(0, num_rows).dequantize().reshape(shape).copy()
        return values

    def _part(self, name: str, shape: tuple[int, ...]) -> Part:
        part = self._reading.parts.get(name)
        if part is None:
            raise CheckpointError(f"{self.owner}: {name} is missing")
        if part.shape != shape:
            raise CheckpointError(
                f"{self.owner}: {name} has shape {list(part.shape)}, the metadata make it {list(shape)}"
            )
        self.parts.take(name)
        return part


class GGUFWeights(QuantisingReader[Rows]):
    """A GGUF file as `models.weights.Weights`, for one model.

    loading: its quantization applies to matrices that are floats in the file. exact: dequantise all blocks into the
    backend's dtype. layout: how the tensors become weights, if other than a text's.
    """

    def __init__(
        self,
        file: GGUF,
        reading: Reading,
        backend: Backend,
        loading: Loading = Loading(),
        exact: bool = False,
        layout: GGUFFormat | None = None,
    ) -> None:
        verify_kernels(loading.quantization, backend)
        _verify_types(file, reading, loading.quantization)
        layout = layout or GGUFFormat(file, reading, backend, exact, loading.on_tensor)
        super().__init__(layout, GGUFStacks(backend, layout.counts, exact), backend, loading)


def _verify_types(file: GGUF, reading: Reading, quantization: Quantization | None) -> None:
    """Raise `CheckpointError` for blocks of an unknown type, and for blocks that would be quantised again."""
    for name, part in reading.parts.items():
        kind = part.info.type
        if kind not in FLOATS and kind not in gguf_blocks.TYPES:
            raise file.fault(f"type of {name}", kind, "one of floats and blocks")
        if quantization is not None and kind not in FLOATS:
            raise CheckpointError(
                f"{file.name} is quantised already ({name} is {kind}); load it without quantization "
                f"{quantization.name!r}"
            )
