"""Adapters of linear layers (LoRA; Hu et al. 2021, arXiv 2106.09685): y = W x + scale * B (A x) for some rows.

`Adapters` knows which matrices may have one, by the names of their layers in the checkpoint, and has a fixed number of
slots; a backend keeps the weights in its own form. Knows names, shapes and slots; must not know files or requests.
Called by backends' ops, and by `engine.library`, which fills it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError


class LayerAdapter(NamedTuple):
    """The adapter of one layer: `a` [rank, in] and `b` [out, rank], of types of `quant.arrays.PLAIN`, and `scale`."""

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float


class Layers(Protocol):
    """The linear layers that are one matrix, as `models.weights.Linear` has them."""

    @property
    def num_in(self) -> int: ...

    @property
    def num_outs(self) -> Sequence[int]: ...

    def layers(self) -> Iterator[tuple[str, int, NDArray[np.int64] | None]]: ...


class Place(NamedTuple):
    """Where a layer is: outputs begin ... begin + num_out - 1 of a matrix, whose output i is row order[i] of the
    checkpoint's layer. `part` counts the matrix's layers."""

    matrix: Any
    part: int
    num_in: int
    begin: int
    num_out: int
    order: NDArray[np.int64] | None


Prepared = list[tuple[Place, Any]]
"""Places and what a backend keeps for them."""


class Adapters(ABC):
    """The places of a model's adapters, and who is in which slot. A subclass keeps the weights.

    Args:
        num_slots: for adapters, and for those that share the weights of others.
        max_rank: the greatest rank of one.
    """

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.places: dict[str, Place] = {}

    def add(self, matrix: Any, linear: Layers) -> None:
        """Note a matrix whose layers may have adapters."""
        begin = 0
        for part, (name, num_out, order) in enumerate(linear.layers()):
            self.places[name] = Place(matrix, part, linear.num_in, begin, num_out, order)
            begin += num_out

    def prepare(self, layers: Mapping[str, LayerAdapter]) -> Prepared:
        """Return the adapters of some layers in the backend's form. Changes nothing, so any thread may call it.

        Raises `CheckpointError` for a layer that the model does not have or that takes none, and for weights of another
        shape.
        """
        for name, layer in layers.items():
            self._check(name, layer)
        prepared = []
        for name, (a, b, scale) in layers.items():
            place = self.places[name]
            b = b if place.order is None else b[place.order]
            prepared.append((place, self._prepare(LayerAdapter(a, b, scale))))
        return prepared

    def load(self, slot: int, prepared: Prepared) -> None:
        """Put adapters of layers into a slot, in place of those that are there."""
        self.clear(slot)
        for place, layer in prepared:
            self._put(slot, place, layer)

    @abstractmethod
    def share(self, slot: int, source: int, factor: float) -> None:
        """Put the adapter of the slot `source` into another too, with its products times `factor`. The weights are
        the same ones."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Free a slot."""

    @abstractmethod
    def _prepare(self, layer: LayerAdapter) -> Any:
        """Return the adapter of one layer in the backend's form."""

    @abstractmethod
    def _put(self, slot: int, place: Place, layer: Any) -> None:
        """Keep the adapter of one layer, in the backend's form, in a slot."""

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
