"""Adapters of linear layers (LoRA; Hu et al. 2021, arXiv 2106.09685): y = W x + scale * B (A x) for some rows.

One with magnitudes (DoRA; Liu et al. 2024, arXiv 2402.09353) gives each row of W + scale * B A a norm of its own. It is
made a `NormedAdapter` when it is prepared, so that the base's product stays that of all rows.

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
from headrace.quant.arrays import cast, floats, type_name

SLAB_NUMBERS = 2**17
"""Most weights of the base that are read at once."""


class LayerAdapter(NamedTuple):
    """The adapter of one layer: `a` [rank, in] and `b` [out, rank], of types of `quant.arrays.PLAIN`, and `scale`.

    magnitudes: DoRA's, float32 [out], the norms of the rows of the weights with the adapter; None: as they come.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float
    magnitudes: NDArray[np.float32] | None = None


class NormedAdapter(NamedTuple):
    """The adapter of one layer as backends compute it: it adds scale * (B A x + gains * y + shifts) to the base's
    product y, bias included. gains, shifts: float32 [out], the rows of one array; None for zeros."""

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float
    gains: NDArray[np.float32] | None = None

    @property
    def stored_type(self) -> str:
        """The smallest type that has the numbers of both matrices exactly."""
        names = {type_name(self.a), type_name(self.b)}
        if len(names) == 1 and names < {"float16", "bfloat16"}:
            return names.pop()
        for name in ("bfloat16", "float16"):
            if all(np.array_equal(floats(cast(each, name)), floats(each)) for each in (self.a, self.b)):
                return name
        return "float32"


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

        Raises `CheckpointError` for a layer that the model does not have or that takes none, for weights of another
        shape, and for rows without a norm that magnitudes could replace.
        """
        for name, layer in layers.items():
            self._check(name, layer)
        prepared = []
        for name, (a, b, scale, magnitudes) in layers.items():
            place = self.places[name]
            order = slice(None) if place.order is None else place.order
            normed = NormedAdapter(a, b[order], scale)
            if magnitudes is not None:
                normed = self._normed(name, normed, magnitudes[order])
            prepared.append((place, self._prepare(normed)))
        return prepared

    def _normed(self, name: str, layer: NormedAdapter, magnitudes: NDArray[np.float32]) -> NormedAdapter:
        """Return a layer whose rows, in the matrix's order, get the norms `magnitudes`.

        With f = magnitudes / |W + scale * B A| its output f * (W + scale * B A) x + bias is
        y + f * scale * B A x + (f - 1) * (y - bias)."""
        place, a = self.places[name], np.ascontiguousarray(floats(layer.a))
        b = floats(layer.b) * np.float32(layer.scale)
        norms, biases = np.empty(place.num_out), np.zeros(place.num_out)
        for at, weights, bias in self._base_of(place):
            rows = slice(at, at + len(weights))
            whole = weights.T.copy()
            # One rank after the other, and sums down the columns: the order of `@` depends on the processor.
            for row, column in zip(a, b[rows].T, strict=True):
                whole += np.multiply.outer(row, column)
            norms[rows] = np.sqrt(np.square(whole, dtype=np.float64).sum(axis=0))
            biases[rows] = 0 if bias is None else bias
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factors = magnitudes / norms
            gains = np.stack([factors - 1, (1 - factors) * biases]).astype(np.float32)
            b = (b * factors[:, None]).astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(gains).all(axis=0))
        if len(wrong):
            raise CheckpointError(
                f"{name}: {len(wrong)} of {place.num_out} outputs have a norm that is 0, or a norm or magnitude (DoRA) "
                f"that is not finite; the first has the magnitude {magnitudes[wrong[0]]:g}"
            )
        return NormedAdapter(a, b, 1.0, gains)

    def _base_of(self, place: Place) -> Iterator[tuple[int, NDArray[np.float32], NDArray[np.float32] | None]]:
        """Yield the base's weights and biases of a layer some rows at a time, and which row comes first: numbers of
        four bytes take much more memory than the matrix."""
        begin, end, step = place.begin, place.begin + place.num_out, max(1, SLAB_NUMBERS // place.num_in)
        # A matrix of several forms has parts, whose outputs follow each other.
        for part in getattr(place.matrix, "parts", (place.matrix,)):
            for first in range(max(0, begin), min(end, part.num_out), step):
                yield first - begin, *self._base(part, first, min(first + step, end, part.num_out))
            begin, end = begin - part.num_out, end - part.num_out

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
    def _base(self, part: Any, first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the weights [last - first, in] of some outputs of a matrix, or of a part of one, and their biases, if
        it has some."""

    @abstractmethod
    def _prepare(self, layer: NormedAdapter) -> Any:
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
        if layer.magnitudes is not None and layer.magnitudes.shape != (place.num_out,):
            raise CheckpointError(f"{name}: {layer.magnitudes.size} magnitudes; the layer has {place.num_out} outputs")
