"""A GGUF file's weights as a model file sees them: the methods of `checkpoint.loader.Weights`, over the mapped file.

Matrices keep their codes where the kernels have a form for them, and get the nearest form where not; what was done is
told once, with what it costs. Rows of q and k that ggml keeps in pairs come back in halves. Tables and norms are
floats. The file is read some rows at a time and given back. Called by `engine.load`.
"""

from __future__ import annotations

import logging
import mmap
import warnings
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.base import Array, Backend, Matrix
from headrace.checkpoint.gguf_config import BLOCK_BYTES, FLOATS, Part, Reading
from headrace.checkpoint.mapped import MappedTensor, Names, stacked_name
from headrace.checkpoint.packed import PackedWriter
from headrace.checkpoint.packing import Packable, has_layouts
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError
from headrace.quant import rtn
from headrace.quant.base import QWeight, concatenated
from headrace.quant.formats import gguf_blocks
from headrace.quant.schemes import K_TYPES, Quantization, Scheme

logger = logging.getLogger(__name__)

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RELEASE_BYTES = 32 * 2**20
"""Bytes of the file that may lie in memory beside the rows that are being read."""
TABLE_ROWS_WEIGHTS = 2**22


class GGUFMatrix:
    """A `MatrixSource` over rows of blocks or floats, in the form that is fittest for all its parts.

    `exact`: blocks are dequantised into `dtype` instead. `quantization`: what to do with parts that are floats.
    `mixed`: the parts have forms of their own, for which activations are quantised alike; together they are floats.
    """

    columns: Tensor | None = None

    def __init__(
        self, name: str, parts: Sequence[Rows], dtype: str, quantization: Scheme | None = None, exact: bool = False
    ) -> None:
        self.name = name
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
            self.scheme = gguf_blocks.scheme_for(self.kinds)
            if len(self.kinds) > 1 and len({gguf_blocks.scheme_for({kind}).group for kind in self.kinds}) == 1:
                self.mixed, self.scheme = True, Scheme("f", dtype="float32")

    def slab(self, first: int, last: int) -> QWeight:
        found, begin = [], 0
        for part in self.parts:
            end = begin + part.num_out
            if first < end and last > begin:
                found.append(self._piece(part, max(first - begin, 0), min(last, end) - begin))
            begin = end
        return found[0] if len(found) == 1 else concatenated(found)

    def _piece(self, part: Rows, first: int, last: int) -> QWeight:
        if self.mixed:
            own = GGUFMatrix(self.name, [part], "").slab(first, last)
            return QWeight(own.dequantize())
        if self.scheme.kind == "k":
            return gguf_blocks.k_blocks(part.kind, part.raw_rows(first, last), self.name)
        weight = part.read(first, last)
        if self.scheme.kind == "f":
            return QWeight(finite(weight.dequantize().to(getattr(torch, self.scheme.dtype)), self.name).contiguous())
        if part.kind in FLOATS:
            return rtn.quantise(weight.codes, self.scheme, self.name)
        return gguf_blocks.native(weight, part.kind, self.scheme, self.name)


class Rows:
    """Rows of one part of the file, mapped. `order`: where row i of the model lies among the part's rows."""

    def __init__(self, file: GGUFFile, part: Part, order: NDArray[np.int64] | None = None) -> None:
        self.file, self.kind = file, part.info.type
        self.num_out, self.num_in = part.shape
        elements, size = BLOCK_BYTES[self.kind]
        self.row_bytes = self.num_in // elements * size
        begin = part.info.start + part.first * self.row_bytes
        raw = np.frombuffer(file.gguf.data, np.uint8, self.num_out * self.row_bytes, begin)
        self.raw = raw.reshape(self.num_out, self.row_bytes)
        self.order = order

    def read(self, first: int, last: int) -> QWeight:
        """Rows first ... last - 1: plain floats as they are stored, or codes with exact scales."""
        raw = self.raw_rows(first, last)
        if self.kind in TORCH:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                flat = torch.frombuffer(np.ascontiguousarray(raw), dtype=torch.uint8)
            if flat.data_ptr() % TORCH[self.kind].itemsize:  # an alignment below the element's size is legal
                flat = flat.clone()
            return QWeight(flat.view(TORCH[self.kind]).view(last - first, self.num_in))
        return gguf_blocks.decode(self.kind, raw)

    def raw_rows(self, first: int, last: int) -> NDArray[np.uint8]:
        self.file.about_to_read((last - first) * self.row_bytes)
        return self.raw[first:last] if self.order is None else self.raw[self.order[first:last]]


class GGUFFile:
    """The mapped file, of which not much is in memory at a time."""

    def __init__(self, file: GGUF) -> None:
        self.gguf = file
        self._read = 0

    def about_to_read(self, num_bytes: int) -> None:
        self._read += num_bytes
        if self._read > RELEASE_BYTES:
            self.release()
            self._read = 0

    def release(self) -> None:
        if isinstance(self.gguf.data, mmap.mmap):
            self.gguf.data.madvise(mmap.MADV_DONTNEED)


class GGUFWeights:
    """What `checkpoint.loader.Weights` is to a checkpoint of safetensors.

    Args:
        quantization: what to do with matrices that the file has as floats.
        exact: dequantise all into the model's dtype.
        writer: is given everything in the form in which it can be mapped next time.
    """

    def __init__(
        self,
        file: GGUF,
        reading: Reading,
        backend: Backend,
        on_tensor: Callable[[int, int], None] | None = None,
        quantization: Quantization | None = None,
        exact: bool = False,
        writer: PackedWriter | None = None,
    ) -> None:
        self._file = GGUFFile(file)
        self._writer = writer
        self._name = file.name
        self._reading = reading
        self._backend = backend
        self._on_tensor = on_tensor
        self._quantization = quantization
        self._exact = exact
        names = Names(reading.parts)
        self.has, self.has_prefix, self.constant = names.has, names.has_prefix, backend.constant
        self._taken: set[str] = set()
        self._told: dict[tuple[str, str], list[int]] = {}
        for name, part in reading.parts.items():
            kind = part.info.type
            if kind not in TORCH and kind not in gguf_blocks.TYPES:
                raise file.fault(f"type of {name}", kind, "one of floats and blocks")
            if quantization is not None and kind not in TORCH:
                raise CheckpointError(
                    f"{self._name} is quantised already ({name} is {kind}); load it without quantization "
                    f"{quantization.name!r}"
                )

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """A small tensor (norm, bias) as the backend's operators take it."""
        values = self._vector(name, shape)
        if self._reading.norm_offset and name.endswith("norm.weight"):
            values = values - self._reading.norm_offset
        if self._writer is not None:
            self._writer.tensor(name, values.numpy())
        return self._backend.constant(values)

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        """An embedding table [V, H]: floats stay mapped, blocks are dequantised into the model's dtype."""
        rows = Rows(self._file, self._part(name, shape))
        if rows.kind in TORCH:
            return self._backend.table(rows.read(0, rows.num_out).codes)
        if rows.kind in self._backend.block_tables and not self._exact:
            step = max(TABLE_ROWS_WEIGHTS // rows.num_in, 1)
            for first in range(0, rows.num_out, step):
                gguf_blocks.check_scales(rows.kind, rows.raw_rows(first, min(first + step, rows.num_out)), name)
            self._tell(rows.kind, f"{rows.kind} (table, mapped)", rows.raw.nbytes, rows.raw.nbytes)
            return self._backend.table(MappedTensor(rows.raw, rows.kind))
        return self._backend.table(self.floats(name, shape))

    def floats(self, name: str, shape: tuple[int, int]) -> Tensor:
        """A table of blocks in the model's dtype."""
        rows = Rows(self._file, self._part(name, shape))
        table = torch.empty(shape, dtype=getattr(torch, self._backend.dtype))
        step = max(TABLE_ROWS_WEIGHTS // rows.num_in, 1)
        for first in range(0, rows.num_out, step):
            last = min(first + step, rows.num_out)
            table[first:last] = finite(rows.read(first, last).dequantize().to(table.dtype), name)
        self._tell(rows.kind, f"{self._backend.dtype} (table)", rows.raw.nbytes, table.nbytes)
        return table

    def linear(
        self,
        names: Sequence[str],
        num_in: int,
        num_outs: Sequence[int],
        *,
        bias: bool = False,
        transposed: bool = False,
        plain: bool = False,
    ) -> Matrix:
        """One matrix out of `names`. GGUF has every matrix as [out, in], so `transposed` changes nothing."""
        parts = [
            self._rows(name, self._part(f"{name}.weight", (num_out, num_in)))
            for name, num_out in zip(names, num_outs, strict=True)
        ]
        values = None
        if bias:
            values = torch.cat([self._bias(n, size) for n, size in zip(names, num_outs, strict=True)])
        scheme = None if plain or self._quantization is None else self._quantization.layer
        return self._matrix(names, parts, scheme, values, exact=plain or self._exact)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        """The embedding table [V, H] and the head's matrix, out of the same tensor if `tied`."""
        first = f"{embedding}.weight"
        table = self.table(first, shape)
        rows = Rows(self._file, self._part(first if tied else f"{head}.weight", shape))
        scheme = None if self._quantization is None else self._quantization.head
        return table, self._matrix([head], [rows], scheme, None, exact=self._exact)

    def finish(self) -> None:
        """Raise `CheckpointError` if the file has tensors that the model did not ask for; tell what became of all."""
        left = sorted(self._reading.parts.keys() - self._taken)
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise CheckpointError(f"{len(left)} tensors of {self._name} have no place in the model: {shown}")
        self._file.release()
        for (kind, form), (num, before, after) in sorted(self._told.items()):
            logger.info(
                "%s: %d of %s run as %s, %.1f MiB for %.1f in the file",
                self._name, num, kind, form, after / 2**20, before / 2**20,
            )  # fmt: skip

    def _matrix(
        self, names: Sequence[str], parts: list[Rows], scheme: Scheme | None, bias: Tensor | None, exact: bool
    ) -> Matrix:
        source = GGUFMatrix(stacked_name(names), parts, self._backend.dtype, scheme, exact)
        if source.mixed and has_layouts(self._backend):
            made, begin, row = [], 0, 0
            for end in range(1, len(parts) + 1):
                if end < len(parts) and parts[end].kind == parts[begin].kind:
                    continue
                last = row + sum(part.num_out for part in parts[begin:end])
                some = None if bias is None else bias[row:last]
                made.append(self._matrix(names[begin:end], parts[begin:end], scheme, some, exact))
                begin, row = end, last
            stack: Matrix = self._backend.ops.stacked(source.name, made)
            return stack
        own = None if bias is None else self._backend.constant(bias)
        matrix: Matrix = self._backend.ops.matrix(source, own)
        if self._writer is not None:
            self._writer.matrix(source.name, cast("Packable", matrix), None if bias is None else bias.float().numpy())
        before = sum(part.raw.nbytes for part in parts)
        after = round(bits_of(source.scheme) * source.num_in * source.num_out / 8)
        self._tell("+".join(sorted(source.kinds)), form_of(source.scheme), before, after)
        return matrix

    def _tell(self, kind: str, form: str, before: int, after: int) -> None:
        entry = self._told.setdefault((kind, form), [0, 0, 0])
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + before, entry[2] + after

    def _rows(self, name: str, part: Part) -> Rows:
        return Rows(self._file, part, self._order(name, part.shape[0]))

    def _order(self, name: str, num_rows: int) -> NDArray[np.int64] | None:
        """Where the rows of q and k lie: ggml's pairs (2i, 2i + 1) of a head are (i, i + half) for the model."""
        if not self._reading.turned or not name.endswith((".q_proj", ".k_proj")):
            return None
        return pair_order(num_rows, self._reading.values["head_dim"], self._reading.turned)

    def _bias(self, name: str, size: int) -> Tensor:
        values = self._vector(f"{name}.bias", (size,))
        order = self._order(name, size)
        return values if order is None else values[torch.from_numpy(order)]

    def _vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        part = self._part(name, shape)
        if part.info.type not in TORCH or len(shape) != 1:
            raise CheckpointError(
                f"{self._name}: {name} is {part.info.type} of {len(shape)} dimensions, expected floats"
            )
        return Rows(self._file, part._replace(shape=(1, *shape))).read(0, 1).codes[0].float().clone()

    def _part(self, name: str, shape: tuple[int, ...]) -> Part:
        part = self._reading.parts.get(name)
        if part is None:
            raise CheckpointError(f"{self._name}: {name} is missing")
        if part.shape != shape:
            raise CheckpointError(
                f"{self._name}: {name} has shape {list(part.shape)}, the metadata make it {list(shape)}"
            )
        self._taken.add(name)
        if self._on_tensor is not None:
            self._on_tensor(len(self._taken), len(self._reading.parts))
        return part


def pair_order(num_rows: int, head_dim: int, turned: int) -> NDArray[np.int64]:
    """Where row i of the model's q or k lies in a file whose heads have the `turned` rows that rope turns in pairs."""
    own = np.arange(head_dim)
    own[:turned] = np.arange(turned).reshape(turned // 2, 2).T.ravel()
    order: NDArray[np.int64] = (np.arange(0, num_rows, head_dim)[:, None] + own).ravel()
    return order


def finite(values: Tensor, name: str) -> Tensor:
    """`values`, or `CheckpointError` if dequantising went beyond their dtype."""
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{name} has a weight that is not finite, or beyond {values.dtype}; try dtype float32")
    return values


def form_of(scheme: Scheme) -> str:
    if scheme.kind in ("f", "k"):
        return scheme.dtype
    name = scheme.book.upper() or f"int{scheme.bits}"
    return f"{name} in groups of {scheme.group}" + (" with minima" if scheme.has_min else "")


def bits_of(scheme: Scheme) -> float:
    """Of a weight as the kernels store it."""
    if scheme.kind == "f":
        return {"float32": 32, "float16": 16, "bfloat16": 16}[scheme.dtype]
    if scheme.kind == "k":
        return K_TYPES[scheme.dtype].bits
    return scheme.bits + (16 * (1 + scheme.has_min) / scheme.group if scheme.group else 0)
