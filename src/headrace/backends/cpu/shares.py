"""One rank's part of a packed matrix: the panels of its layout; of an expert on another rank, the form without weights.

Knows matrices and layouts; must not know values, models or processes. Called by `ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.cpu.matrix import ACT_GROUP, CpuMatrix
from headrace.backends.cpu.memory import Pool
from headrace.backends.native import require_native
from headrace.backends.shares import Bounds
from headrace.protocol.errors import CheckpointError
from headrace.quant.base import MatrixSource
from headrace.quant.schemes import native_flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.backends.cpu.matrix import PackedRecord

PANEL = 32
"""Outputs that every format packs together."""


def without_weights(source: MatrixSource | PackedRecord) -> CpuMatrix:
    """Return the matrix of a source without its weights, which another rank has."""
    order = None if source.permutation is None else source.permutation.astype(np.int32)
    nothing = np.empty(0, np.uint8)
    return CpuMatrix(source.name, source.scheme, nothing, source.num_in, source.num_out, permutation=order)


def some_rows(values: NDArray[np.float32] | None, bounds: Sequence[tuple[int, int]]) -> NDArray[np.float32] | None:
    return None if values is None else np.concatenate([values[begin:end] for begin, end in bounds])


def panels(record: PackedRecord, bounds: Sequence[Bounds], rank: int, pool: Pool) -> PackedRecord:
    """Return the outputs `bounds` of a packed matrix, copied into memory of `pool`. Raises `CheckpointError` where they
    are no whole panels."""
    scheme = record.scheme
    if any(begin % PANEL or (end % PANEL and end != record.num_out) for begin, end in bounds):
        raise CheckpointError(f"{record.name}: the share of rank {rank} begins or ends within a panel")
    group, flag = scheme.group or ACT_GROUP, native_flag(scheme)
    size = require_native().packed_bytes(scheme.kind, PANEL, record.num_in, group, flag)
    pieces = [record.data[begin // PANEL * size : -(-end // PANEL) * size] for begin, end in bounds]
    data = pool.take(sum(len(piece) for piece in pieces))
    np.concatenate(pieces, out=data)
    num_out = sum(end - begin for begin, end in bounds)
    changed: Any = record  # a dataclass
    part: PackedRecord = replace(changed, data=data, num_out=num_out, bias=some_rows(record.bias, bounds))
    return part
