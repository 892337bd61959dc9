"""The cpu backend's adapters: their weights in the form of csrc/generic/adapters.cpp, and the records that use them.

A matrix that may have one gets two records beside its product, which look up the slots of a step's rows when the tape
runs: so adapters come and go without a new tape. Knows matrices and buffers; must not know files. Called by `ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.adapters import Adapters, LayerAdapter, Layers, Place
from headrace.backends.cpu.memory import aligned
from headrace.quant.arrays import cast, floats, type_name

if TYPE_CHECKING:
    from headrace.backends.graph import Graph, Value
    from headrace.backends.step import StepRows

PART = np.dtype([("a", "u8"), ("b", "u8"), ("rank", "i4"), ("type", "i4"), ("scale", "f8")])
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
LANES = 16


class Stored(NamedTuple):
    """The adapter of a layer in the form of the records: A [rank, in] and B transposed [rank, out], both padded."""

    a: NDArray[Any]
    b: NDArray[Any]
    rank: int
    type: int
    scale: float


class Spot:
    """A matrix's adapters: `table` [slots, layers], and where the outputs of each layer begin."""

    def __init__(self, num_slots: int, num_in: int, widths: list[int]) -> None:
        self.num_in = num_in
        self.begins = np.cumsum([0, *widths], dtype=np.int64)
        self.table = np.zeros((num_slots, len(widths)), PART)
        self.matrices: dict[tuple[int, int], tuple[NDArray[Any], NDArray[Any]]] = {}


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
            for key in [key for key in spot.matrices if key[0] == slot]:
                del spot.matrices[key]

    def share(self, slot: int, source: int, factor: float) -> None:
        self.clear(slot)
        for spot in self.spots.values():
            spot.table[slot] = spot.table[source]
            spot.table[slot]["scale"] *= factor
            parts = range(len(spot.begins) - 1)
            spot.matrices |= {(slot, i): spot.matrices[source, i] for i in parts if (source, i) in spot.matrices}

    def _prepare(self, layer: LayerAdapter) -> Stored:
        dtype = stored_type(layer)
        return Stored(padded(layer.a, dtype), padded(layer.b.T, dtype), len(layer.a), TYPES[dtype], layer.scale)

    def _put(self, slot: int, place: Place, layer: Stored) -> None:
        spot, (a, b, *facts) = self.spots[place.matrix], layer
        spot.matrices[slot, place.part] = a, b
        spot.table[slot, place.part] = a.ctypes.data, b.ctypes.data, *facts

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
        """Put the record that adds B `inner` to the product `out`."""
        spot, rows = self.spots[matrix], self.rows
        if rows is None:
            raise ValueError("no program is recorded")
        fields = self._fields(spot, rows) | {"begins": spot.begins, "x": graph.read(inner), "ld_x": inner.ld}
        graph.touch(out.buffer)
        out.tail = graph.put("adapt_out", out.dim, None, fields | {"out": out.at, "ld_out": out.ld})

    def _fields(self, spot: Spot, rows: StepRows) -> dict[str, Any]:
        facts = {"tiles": rows.adapted, "list": rows.adapted_rows, "table": spot.table}
        return facts | {"parts": len(spot.begins) - 1, "max_rank": self.max_rank}


def stored_type(layer: LayerAdapter) -> str:
    """Return the smallest type that has the numbers of both matrices exactly."""
    names = {type_name(layer.a), type_name(layer.b)}
    if len(names) == 1 and names < {"float16", "bfloat16"}:
        return names.pop()
    for name in ("bfloat16", "float16"):
        if all(np.array_equal(floats(cast(each, name)), floats(each)) for each in (layer.a, layer.b)):
            return name
    return "float32"


def padded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return rows of `dtype`, each with zeros behind it to a multiple of 16 numbers."""
    values = cast(np.ascontiguousarray(values), dtype)
    num, width = values.shape
    ld = -(-width // LANES) * LANES
    out = aligned(max(1, num * ld * values.itemsize))[: num * ld * values.itemsize].view(values.dtype).reshape(num, ld)
    out[:, :width] = values
    return out
