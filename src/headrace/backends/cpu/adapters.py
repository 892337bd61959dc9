"""The cpu backend's adapters: their weights in the form of csrc/generic/adapters.cpp, and the records that use them.

A matrix that may have one gets two records beside its product, which look up the slots of a step's rows when the tape
runs: so adapters come and go without a new tape. Knows matrices and buffers; must not know files. Called by `ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.adapters import Adapters, Layers, NormedAdapter, Place
from headrace.backends.cpu.memory import aligned
from headrace.quant.arrays import cast

if TYPE_CHECKING:
    from headrace.backends.cpu.matrix import CpuMatrix
    from headrace.backends.graph import Graph, Value
    from headrace.backends.step import StepRows

PART = np.dtype([("a", "u8"), ("b", "u8"), ("rank", "i4"), ("type", "i4"), ("scale", "f8"), ("gains", "u8")])
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
LANES = 16


class Stored(NamedTuple):
    """The adapter of a layer in the form of the records: A [rank, in], B transposed [rank, out] and gains [2, out], all
    padded."""

    a: NDArray[Any]
    b: NDArray[Any]
    gains: NDArray[np.float32] | None
    entry: tuple[int | float, ...]


class Spot:
    """A matrix's adapters: `table` [slots, layers], and where the outputs of each layer begin."""

    def __init__(self, num_slots: int, num_in: int, widths: list[int]) -> None:
        self.num_in = num_in
        self.begins = np.cumsum([0, *widths], dtype=np.int64)
        self.table = np.zeros((num_slots, len(widths)), PART)
        self.layers: dict[tuple[int, int], Stored] = {}


class CpuAdapters(Adapters):
    """`rows`: the inputs of the program that is being recorded."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        super().__init__(num_slots, max_rank)
        self.spots: dict[Any, Spot] = {}
        self.rows: StepRows | None = None

    def add(self, matrix: Any, linear: Layers) -> None:
        super().add(matrix, linear)
        self.spots[matrix] = Spot(self.num_slots, linear.num_in, list(linear.num_outs))

    def clear(self, slot: int) -> None:
        for spot in self.spots.values():
            spot.table[slot] = 0
            spot.layers = {key: layer for key, layer in spot.layers.items() if key[0] != slot}

    def share(self, slot: int, source: int, factor: float) -> None:
        self.clear(slot)
        for spot in self.spots.values():
            spot.table[slot] = spot.table[source]
            spot.table[slot]["scale"] *= factor
            spot.layers |= {(slot, part): layer for (of, part), layer in spot.layers.items() if of == source}

    def _base(self, part: CpuMatrix, first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        return part.dense(first, last), None if part.bias is None else part.bias[first:last]

    def _prepare(self, layer: NormedAdapter) -> Stored:
        dtype = layer.stored_type
        a, b = padded(layer.a, dtype), padded(layer.b.T, dtype)
        gains = None if layer.gains is None else padded(layer.gains, "float32")
        at = 0 if gains is None else gains.ctypes.data
        return Stored(a, b, gains, (a.ctypes.data, b.ctypes.data, len(layer.a), TYPES[dtype], layer.scale, at))

    def _put(self, slot: int, place: Place, layer: Stored) -> None:
        spot = self.spots[place.matrix]
        spot.layers[slot, place.part] = layer
        spot.table[slot, place.part] = layer.entry

    def before(self, graph: Graph, x: Value, matrix: Any) -> Value | None:
        """Put the record of A x for a matrix that may have adapters, and return its outputs."""
        spot, rows = self.spots.get(matrix), self.rows
        if spot is None or rows is None or rows.adapted is None:
            return None
        out = graph.value(len(spot.begins[1:]) * self.max_rank, x.dim)
        fields = self._fields(spot, rows) | {"x": graph.read(x), "ld_x": x.ld, "num_in": spot.num_in}
        graph.put("adapt_in", x.dim, out, fields | {"out": out.buffer, "ld_out": out.ld})
        out.node = None
        return out

    def after(self, graph: Graph, inner: Value, matrix: Any, out: Value) -> None:
        """Put the record that adds B `inner` to the product `out`. Gains are of the product alone: the record has
        the residual that goes into it, too."""
        spot, rows = self.spots[matrix], self.rows
        if rows is None:
            raise ValueError("no program is recorded")
        fields = self._fields(spot, rows) | {"begins": spot.begins, "x": graph.read(inner), "ld_x": inner.ld}
        graph.touch(out.buffer)
        fields |= {"residual": None, "ld_res": 0, "out": out.at, "ld_out": out.ld}
        out.tail = graph.put("adapt_out", out.dim, None, fields)

    def _fields(self, spot: Spot, rows: StepRows) -> dict[str, Any]:
        facts = {"tiles": rows.adapted, "list": rows.adapted_rows, "table": spot.table}
        return facts | {"parts": len(spot.begins) - 1, "max_rank": self.max_rank}


def padded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return rows of `dtype`, each with zeros behind it to a multiple of 16 numbers."""
    values = cast(np.ascontiguousarray(values), dtype)
    num, width = values.shape
    ld = -(-width // LANES) * LANES
    out = aligned(max(1, num * ld * values.itemsize))[: num * ld * values.itemsize].view(values.dtype).reshape(num, ld)
    out[:, :width] = values
    return out
