"""Weights in the kernels' layout: packed once from a `MatrixSource`, or mapped from a file that was packed before.

Owns the bytes and their description. Layouts are the native library's (csrc/format_*.cpp). Called by `ops`, and by
`checkpoint.packed`, which writes and maps the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.memory import Pool
from headrace.backends.native import require_native
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import cast, joined
from headrace.quant.schemes import K_BLOCK, K_GROUP, K_TYPES, Scheme, native_flag

if TYPE_CHECKING:
    from headrace.quant.base import MatrixSource, QWeight

ACT_GROUP = 128
"""Inputs that share a scale of the activations where the weights have one scale for each output."""

MAX_IN = 2**18
"""Inputs of a matrix whose quantised rows fit the kernels' scratch memory."""

MAX_GROUP = 2**17
"""Most inputs with one scale: the sum of their products of 8-bit codes fits 32 bits."""

EXTRAS = (("i4", "i5", "i6", "i8"), ("i4",), ("i2", "i3"))
"""Kinds that may have minima (i8: in groups), a codebook, zeros."""

SLAB_NUMBERS = 2**22
"""Most weights that are read from a source at once."""

TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2} | {name: kind.code for name, kind in K_TYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Outliers:
    """Inputs that are multiplied in float, with weights of 16 bits (LLM.int8(), Dettmers et al. 2022, section 3.2).

    columns: int64 [n]. pick [n, in] takes them out of a row; back [in, n] gives their negatives, which leave zeros when
    they are added to the row; kept [out, n] has their weights. All three are plain matrices; ones and zeros are exact.
    """

    columns: NDArray[np.int64]
    pick: CpuMatrix
    back: CpuMatrix
    kept: CpuMatrix

    @property
    def num_bytes(self) -> int:
        return sum(matrix.data.nbytes for matrix in (self.pick, self.back, self.kept))


@dataclass(frozen=True, slots=True, eq=False)
class CpuMatrix:
    """A linear layer. `data`: uint8 as the native format of `scheme` packs it; `bias`: [num_out]; `permutation`: int32
    [num_in], the input that each of the packed inputs is.

    Raises `CheckpointError` for a form that the kernels do not have.
    """

    name: str
    scheme: Scheme
    data: NDArray[np.uint8]
    num_in: int
    num_out: int
    bias: NDArray[np.float32] | None = None
    outliers: Outliers | None = None
    permutation: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        # The kernels trust these, wherever the matrix came from: quantised rows must fit their scratch memory.
        scheme = self.scheme
        if self.kind != "f" and (self.num_in > MAX_IN or self.group % 8 or self.group > MAX_GROUP):
            raise CheckpointError(
                f"{self.name}: {self.num_in} inputs in groups of {self.group}; the native kernels take at most "
                f"{MAX_IN}, and groups that are multiples of 8 of at most {MAX_GROUP}"
            )
        extras = [scheme.has_min, bool(scheme.book), scheme.has_zero]
        unknown = any(extra and self.kind not in EXTRAS[i] for i, extra in enumerate(extras))
        if sum(extras) > 1 or unknown or (self.kind == "i8" and scheme.has_min and not scheme.group):
            raise CheckpointError(f"{self.name}: codes of kind {self.kind} have no form {scheme}")
        if self.kind in ("i3", "i5") and self.group % 16:
            raise CheckpointError(
                f"{self.name}: groups of {self.group}; those of {scheme.bits} bits are multiples of 16"
            )
        if self.kind == "k" and (scheme.dtype not in K_TYPES or self.num_in % K_BLOCK or self.group != K_GROUP):
            raise CheckpointError(
                f"{self.name}: {self.num_in} inputs in groups of {self.group}, type {scheme.dtype}, are no K-quants"
            )

        order = self.permutation
        if order is not None and not np.array_equal(np.sort(order), np.arange(self.num_in)):
            raise CheckpointError(f"{self.name}: its {self.num_in} inputs are not each once in their order")

    @property
    def kind(self) -> str:
        return self.scheme.kind

    @property
    def group(self) -> int:
        return self.scheme.group

    @property
    def flag(self) -> int:
        return native_flag(self.scheme)

    @property
    def num_bytes(self) -> int:
        """The bytes of all that a row is multiplied with."""
        order = 0 if self.permutation is None else self.permutation.nbytes
        return self.data.nbytes + order + (0 if self.outliers is None else self.outliers.num_bytes)

    @property
    def packed(self) -> NDArray[np.uint8]:
        return self.data

    @property
    def act_group(self) -> int:
        return self.group or ACT_GROUP

    def dense(self, first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        """The weights of outputs first ... last - 1 (None: of all others) as float32 [outputs, num_in]."""
        rows = range(self.num_out)[first:last]
        out = unpacked(self.kind, self.data, self.num_out, self.num_in, self.act_group, self.flag, rows)
        if self.permutation is not None:
            out = out[:, self.permutation.argsort()]
        if self.outliers is not None:
            out[:, self.outliers.columns] = self.outliers.kept.dense(first, last)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class CpuStack:
    """Matrices of different forms over the same inputs, whose outputs lie one after the other."""

    name: str
    parts: tuple[CpuMatrix, ...]

    def __post_init__(self) -> None:
        if len({part.num_in for part in self.parts}) != 1:
            raise CheckpointError(f"{self.name}: its parts have different inputs")

    @property
    def num_in(self) -> int:
        return self.parts[0].num_in

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    def dense(self) -> NDArray[np.float32]:
        return np.concatenate([part.dense() for part in self.parts])


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An embedding table [height, width] as it is stored: at `data` in memory, and where that is the mapping of a file,
    from byte `place` of the descriptor `file` (else -1). `owner` keeps the memory (an array, a mapping) alive."""

    data: int
    file: int
    place: int
    type_code: int
    height: int
    width: int
    owner: Any


class PackedRecord(Protocol):
    """A matrix out of a packed file (`checkpoint.packed.PackedMatrix`)."""

    name: str
    scheme: Scheme
    data: NDArray[np.uint8]
    num_in: int
    num_out: int
    bias: NDArray[np.float32] | None
    permutation: NDArray[np.int32] | None


def parts_of(matrix: CpuMatrix | CpuStack) -> tuple[CpuMatrix, ...]:
    return matrix.parts if isinstance(matrix, CpuStack) else (matrix,)


def unpacked(
    kind: str, data: NDArray[np.uint8], num_out: int, num_in: int, act_group: int, flag: int, rows: range
) -> NDArray[np.float32]:
    """Rows of packed weights as float32 [rows, num_in]. kind and flag: see HrFormat in csrc/include/kernels.h."""
    native = require_native()
    out = np.empty((len(rows), num_in), np.float32)
    for row, into in zip(rows, out, strict=True):
        native.unpack_row(kind, data.ctypes.data, num_out, num_in, act_group, flag, row, into.ctypes.data)
    return out


def make_matrix(source: MatrixSource, bias: NDArray[np.float32] | None, pool: Pool) -> CpuMatrix:
    """Pack `source`, some rows at a time, into memory of `pool`."""
    native = require_native()
    scheme = source.scheme
    kind, flag, act_group = scheme.kind, native_flag(scheme), scheme.group or ACT_GROUP
    num_out, num_in = source.num_out, source.num_in
    data = pool.take(native.packed_bytes(kind, num_out, num_in, act_group, flag))
    panel = native.panel(kind)
    step = max(panel, SLAB_NUMBERS // num_in // panel * panel)
    for first in range(0, num_out, step):
        last = min(num_out, first + step)
        codes, scales, mins = _parts(source.slab(first, last), kind)
        native.pack(
            kind, codes.ctypes.data, _address(scales), _address(mins), num_in, act_group, flag, first, last, num_out,
            data.ctypes.data,
        )  # fmt: skip
    order = None if source.permutation is None else source.permutation.astype(np.int32)
    return CpuMatrix(source.name, scheme, data, num_in, num_out, bias, _outliers(source, pool), order)


def _outliers(source: MatrixSource, pool: Pool) -> Outliers | None:
    if source.columns is None:
        return None
    from headrace.quant.base import QWeight, SplitWeight, slabs, source_of

    columns, parts = source.columns, []
    for first, last in slabs(source):
        part = source.slab(first, last)
        if not isinstance(part, SplitWeight) or part.kept is None:
            raise ValueError(f"{source.name}: outliers without their weights")
        parts.append(part.kept)
    pick = np.zeros((len(columns), source.num_in), np.float32)
    pick[np.arange(len(columns)), columns] = 1
    plain = (cast(pick, "bfloat16"), cast(np.ascontiguousarray(-pick.T), "bfloat16"), joined(parts))
    matrices = [
        make_matrix(source_of([QWeight(weight)], f"{source.name}/{name}"), None, pool)
        for name, weight in zip(("pick", "back", "kept"), plain, strict=True)
    ]
    return Outliers(columns, *matrices)


def _parts(slab: QWeight, kind: str) -> tuple[NDArray[Any], NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """codes, scales, and minima or zeros as the packer reads them."""
    if kind in ("f", "k"):
        return np.ascontiguousarray(slab.codes), None, None
    if slab.scales is None:
        raise ValueError("quantised codes without scales")
    if kind == "f8":
        codes = np.ascontiguousarray(slab.codes).view(np.uint8)
        if ((codes & 127) == 127).any():
            raise CheckpointError("8-bit weights (E4M3) have a code that is not a number")
        return codes, np.ascontiguousarray(slab.scales, np.float32), None
    codes, scales = np.ascontiguousarray(slab.codes.astype(np.int8)), np.ascontiguousarray(slab.scales, np.float32)
    others = slab.zeros if kind in ("i2", "i3") else slab.mins
    return codes, scales, None if others is None else np.ascontiguousarray(others, np.float32)


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else array.ctypes.data
