"""Weights in the kernels' layout: packed once from a `MatrixSource`, or mapped from a file that was packed before.

Owns nothing but bytes and what they mean. Layouts are the native library's (csrc/format_*.cpp). Called by `ops`, and by
`checkpoint.packed`, which writes and maps the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.memory import Pool
from headrace.backends.cpu.native import require_native
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import K_BLOCK, K_GROUP, K_TYPES

if TYPE_CHECKING:
    from headrace.quant.base import MatrixSource, QWeight

ACT_GROUP = 128
"""Inputs that share a scale of the activations where the weights have one scale for each output."""

MAX_IN = 2**18
"""Inputs of a matrix whose quantised rows fit the kernels' scratch."""

MAX_GROUP = 2**17
"""Inputs with one scale, whose products of 8 bits add up in 32."""

SLAB_NUMBERS = 2**22
"""Weights that are asked of a source at once."""

TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2} | {name: kind.code for name, kind in K_TYPES.items()}

NUM_FORMS = {"i4": 5, "i6": 2}
"""Forms of the codes (csrc/include/kernels.h)."""


@dataclass(frozen=True, slots=True, eq=False)
class Outliers:
    """Inputs that are multiplied in float, with weights of 16 bits (LLM.int8(), Dettmers et al. 2022, section 3.2).

    columns: int64 [n]. pick [n, in]: takes them out of a row. back [in, n]: their negatives, which added to the row
    leave zeros. kept [out, n]: their weights. All three are plain matrices; ones and zeros lose nothing.
    """

    columns: NDArray[np.int64]
    pick: CpuMatrix
    back: CpuMatrix
    kept: CpuMatrix


@dataclass(frozen=True, slots=True, eq=False)
class CpuMatrix:
    """A linear layer: `data` uint8 as the format's pack wrote it. `flag`: see HrFormat in csrc/include/kernels.h."""

    name: str
    kind: str
    data: NDArray[np.uint8]
    num_in: int
    num_out: int
    group: int
    flag: int
    bias: NDArray[np.float32] | None = None
    outliers: Outliers | None = None

    @property
    def num_bytes(self) -> int:
        """Of all that a row is multiplied with."""
        own = self.outliers
        return self.data.nbytes + (
            0 if own is None else sum(part.data.nbytes for part in (own.pick, own.back, own.kept))
        )

    def __post_init__(self) -> None:
        # The kernels trust both, wherever the matrix came from: quantised rows must fit their scratch.
        if self.kind != "f" and (self.num_in > MAX_IN or self.group % 8 or self.group > MAX_GROUP):
            raise CheckpointError(
                f"{self.name}: {self.num_in} inputs in groups of {self.group}; the native kernels take at most "
                f"{MAX_IN}, and groups that are multiples of 8 of at most {MAX_GROUP}"
            )
        if self.kind in NUM_FORMS and not 0 <= self.flag < NUM_FORMS[self.kind]:
            raise CheckpointError(f"{self.name}: codes of kind {self.kind} have no form {self.flag}")
        if self.kind == "k":
            known = self.flag in (kind.code for kind in K_TYPES.values())
            if not known or self.num_in % K_BLOCK or self.group != K_GROUP:
                raise CheckpointError(
                    f"{self.name}: {self.num_in} inputs in groups of {self.group}, type {self.flag}, are no K-quants"
                )

    @property
    def packed(self) -> NDArray[np.uint8]:
        return self.data

    @property
    def act_group(self) -> int:
        return self.group or ACT_GROUP

    def dense(self) -> NDArray[np.float32]:
        """The weights as float32 [num_out, num_in], for tests and tools."""
        native = require_native()
        out = np.empty((self.num_out, self.num_in), np.float32)
        for row in range(self.num_out):
            native.unpack_row(
                self.kind, self.data.ctypes.data, self.num_out, self.num_in, self.act_group, self.flag, row,
                out[row].ctypes.data,
            )  # fmt: skip
        if self.outliers is not None:
            out[:, self.outliers.columns] = self.outliers.kept.dense()
        return out


@dataclass(frozen=True, slots=True, eq=False)
class CpuStack:
    """Matrices of other forms over the same inputs, which share a scale in groups of the same size."""

    name: str
    parts: tuple[CpuMatrix, ...]

    def __post_init__(self) -> None:
        if len({(part.num_in, part.act_group) for part in self.parts}) != 1:
            raise CheckpointError(f"{self.name}: its parts have other inputs or groups")

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def outliers(self) -> None:
        return None

    @property
    def num_in(self) -> int:
        return self.parts[0].num_in

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    @property
    def act_group(self) -> int:
        return self.parts[0].act_group

    def dense(self) -> NDArray[np.float32]:
        return np.concatenate([part.dense() for part in self.parts])


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An embedding table [height, width] as it is stored. `owner` keeps the memory (a tensor, a mapping) alive."""

    data: int
    type_code: int
    height: int
    width: int
    owner: Any


class PackedRecord(Protocol):
    """A matrix out of a packed file (`checkpoint.packed.PackedMatrix`)."""

    name: str
    kind: str
    data: NDArray[np.uint8]
    num_in: int
    num_out: int
    group: int
    flag: int
    bias: NDArray[np.float32] | None


def make_matrix(source: MatrixSource, bias: NDArray[np.float32] | None, pool: Pool) -> CpuMatrix:
    """Pack `source`, some rows at a time, into memory of `pool`."""
    native = require_native()
    scheme = source.scheme
    kind, group = scheme.kind, scheme.group
    flag = scheme.flag
    num_out, num_in = source.num_out, source.num_in
    act_group = group or ACT_GROUP
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
    return CpuMatrix(source.name, kind, data, num_in, num_out, group, flag, bias, _outliers(source, pool))


def _outliers(source: MatrixSource, pool: Pool) -> Outliers | None:
    if source.columns is None:
        return None
    import torch

    from headrace.quant.base import QWeight, SplitWeight, slabs, source_of

    columns, parts = source.columns, []
    for first, last in slabs(source):
        part = source.slab(first, last)
        if not isinstance(part, SplitWeight) or part.kept is None:
            raise ValueError(f"{source.name}: outliers without their weights")
        parts.append(part.kept)
    pick = torch.zeros(len(columns), source.num_in, dtype=torch.bfloat16)
    pick[torch.arange(len(columns)), columns] = 1
    plain = (pick, -pick.t().contiguous(), torch.cat(parts))
    made = [
        make_matrix(source_of([QWeight(weight)], f"{source.name}/{name}"), None, pool)
        for name, weight in zip(("pick", "back", "kept"), plain, strict=True)
    ]
    return Outliers(columns.numpy(), *made)


def _parts(slab: QWeight, kind: str) -> tuple[NDArray[Any], NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """codes, scales and minima as the packer reads them."""
    import torch

    if kind == "f":
        codes = slab.codes.contiguous()
        return codes.view(torch.int16).numpy() if codes.itemsize == 2 else codes.numpy(), None, None
    if kind == "k":
        return slab.codes.contiguous().numpy(), None, None
    if slab.scales is None:
        raise ValueError("quantised codes without scales")
    scales = slab.scales.float().contiguous().numpy()
    codes = slab.codes.to(torch.int8).contiguous()
    mins = None if slab.mins is None else slab.mins.float().contiguous().numpy()
    return codes.numpy(), scales, mins


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else array.ctypes.data
