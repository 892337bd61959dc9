"""Adapters of linear layers (LoRA; Hu et al. 2021, arXiv 2106.09685): y = W x + scale * B (A x) for the rows that have one.

`Adapters` knows which matrices may have one, by the names of their layers in the checkpoint, and has a fixed number of
slots; a backend keeps the weights in its own form. Knows names, shapes and slots; must not know files or requests.
Called by backends' ops, and by `engine.library`, which fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Matrix

TILE_ROWS = 4
"""Rows of one adapter that are multiplied together, as csrc/generic/adapters.cpp has it."""


class LayerAdapter(NamedTuple):
    """The adapter of one layer: `a` [rank, in] and `b` [out, rank], of types of `quant.arrays.PLAIN`, and `scale`."""

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float


class Layers(Protocol):
    """The linear layers that are one matrix, as `models.weights.Linear` has them."""

    @property
    def num_in(self) -> int: ...

    def layers(self) -> Iterator[tuple[str, int, NDArray[np.int64] | None]]: ...


class Place(NamedTuple):
    """Where a layer is: outputs begin ... begin + num_out - 1 of a matrix, whose output i is row order[i] of the
    checkpoint's layer. `part` counts the matrix's layers."""

    matrix: Matrix
    part: int
    num_in: int
    begin: int
    num_out: int
    order: NDArray[np.int64] | None


class Adapters:
    """The places of a model's adapters, and who is in which slot. A subclass keeps the weights.

    Args:
        num_slots: adapters that are in memory at once.
        max_rank: the greatest rank of one.
    """

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.places: dict[str, Place] = {}

    def add(self, matrix: Matrix, linear: Layers) -> None:
        """Note a matrix whose layers may have adapters."""
        begin = 0
        for part, (name, num_out, order) in enumerate(linear.layers()):
            self.places[name] = Place(matrix, part, linear.num_in, begin, num_out, order)
            begin += num_out

    def load(self, slot: int, layers: Mapping[str, LayerAdapter]) -> None:
        """Put the adapters of some layers into a slot, in place of those that are there.

        Raises `CheckpointError`, with nothing changed, for a layer that the model does not have or that takes none, and
        for weights of another shape.
        """
        for name, layer in layers.items():
            self._check(name, layer)
        self.clear(slot)
        for name, (a, b, scale) in layers.items():
            place = self.places[name]
            self._put(slot, place, LayerAdapter(a, b if place.order is None else b[place.order], scale))

    def clear(self, slot: int) -> None:
        """Free a slot."""
        raise NotImplementedError

    def _put(self, slot: int, place: Place, layer: LayerAdapter) -> None:
        raise NotImplementedError

    def _check(self, name: str, layer: LayerAdapter) -> None:
        place, rank = self.places.get(name), len(layer.a)
        if place is None:
            raise CheckpointError(f"{name}: the model has no such layer, or one that takes no adapter")
        if not 1 <= rank <= self.max_rank:
            raise CheckpointError(f"{name}: rank {rank}; max_lora_rank is {self.max_rank}")
        shapes = layer.a.shape, layer.b.shape
        if shapes != ((rank, place.num_in), (place.num_out, rank)):
            raise CheckpointError(
                f"{name}: A {list(shapes[0])} and B {list(shapes[1])}; the layer takes [{rank}, {place.num_in}] and "
                f"[{place.num_out}, {rank}]"
            )


def fill_tiles(slots: Sequence[int], begins: Sequence[int], tiles: NDArray[np.int32], rows: NDArray[np.int32]) -> None:
    """Write the rows of chunks in tiles of one slot: chunk c has rows begins[c] ... begins[c + 1] - 1 and slots[c], -1
    for none. tiles: their number, then for each its first place in `rows`, its number of rows and its slot."""
    tiles[0] = 0
    if not slots or max(slots) < 0:
        return
    by_slot: dict[int, list[int]] = {}
    for chunk, slot in enumerate(slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).extend(range(begins[chunk], begins[chunk + 1]))
    entries: list[int] = []
    place = 0
    for slot, of_slot in sorted(by_slot.items()):
        rows[place : place + len(of_slot)] = of_slot
        for first in range(0, len(of_slot), TILE_ROWS):
            entries += (place + first, min(TILE_ROWS, len(of_slot) - first), slot)
        place += len(of_slot)
    tiles[1 : 1 + len(entries)] = entries
    tiles[0] = len(entries) // 3
