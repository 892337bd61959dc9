"""The reference backend's adapters. Knows tensors; must not know files. Called by `ops`, filled by `program`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.adapters import Adapters, NormedAdapter, Place
from headrace.backends.tiles import rows_of_slots
from headrace.backends.torch_ref.rowwise import padded, products
from headrace.backends.torch_ref.tensors import tensor

if TYPE_CHECKING:
    from headrace.backends.step import Chunks


class RefLayer(NamedTuple):
    """The adapter of a layer: A [in, rank] and B [rank, out] in multiples of 16; gains [2, out], or None."""

    a: Tensor
    b: Tensor
    scale: float
    gains: Tensor | None


class RefAdapters(Adapters):
    """`rows`: of the current step, those of each slot."""

    def __init__(self, num_slots: int, max_rank: int, device: torch.device) -> None:
        super().__init__(num_slots, max_rank)
        self.device, self.rows = device, dict[int, Tensor]()
        # By matrix: of each slot the layers and their places.
        self._layers: dict[Any, dict[int, list[tuple[Place, RefLayer]]]] = defaultdict(dict)

    def follow(self, chunks: Chunks) -> None:
        """Take the rows of a step."""
        begins = [0, *itertools.accumulate(map(len, chunks.token_ids))]
        of_slots = rows_of_slots(chunks.adapters, begins)
        self.rows = {slot: torch.tensor(rows, device=self.device) for slot, rows in of_slots.items()}

    def clear(self, slot: int) -> None:
        for of_matrix in self._layers.values():
            of_matrix.pop(slot, None)

    def share(self, slot: int, source: int, factor: float) -> None:
        self.clear(slot)
        for of_matrix in self._layers.values():
            if source in of_matrix:
                layers = of_matrix[source]
                of_matrix[slot] = [(place, layer._replace(scale=layer.scale * factor)) for place, layer in layers]

    def _base(self, part: Any, first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        weights = part.data[: part.num_in, first:last].t()
        bias = None if part.bias is None else part.bias[first:last].float().cpu().numpy()
        return weights.float().cpu().numpy(), bias

    def _prepare(self, layer: NormedAdapter) -> RefLayer:
        a, b = (_along(tensor(each).float().T, self.device) for each in (layer.a, layer.b))
        gains = None if layer.gains is None else tensor(layer.gains).to(self.device)
        return RefLayer(a, b, layer.scale, gains)

    def _put(self, slot: int, place: Place, layer: RefLayer) -> None:
        self._layers[place.matrix].setdefault(slot, []).append((place, layer))

    def added(self, x: Tensor, matrix: Any, out: Tensor) -> Tensor:
        """Return the product `out` of x, float32, with what the adapters of its rows add."""
        layers = self._layers.get(matrix)
        if not layers or not self.rows:
            return out
        out = out.clone()
        for slot, rows in self.rows.items():
            for place, layer in layers.get(slot, ()):
                columns = slice(place.begin, place.begin + place.num_out)
                inner = _product(x[rows].float(), layer.a) * layer.scale
                added = _product(inner, layer.b)[:, : place.num_out]
                if layer.gains is not None:
                    added += (out[rows, columns] * layer.gains[0] + layer.gains[1]) * layer.scale
                out[rows, columns] += added
        return out


def _along(weights: Tensor, device: torch.device) -> Tensor:
    """Return weights [in, out] with zeros to multiples of 16 on both sides."""
    num_in, num_out = weights.shape
    data = torch.zeros(padded(num_in), padded(num_out), device=device)
    data[:num_in, :num_out] = weights.to(device)
    return data


def _product(x: Tensor, data: Tensor) -> Tensor:
    x = torch.nn.functional.pad(x, (0, data.shape[0] - x.shape[1]))
    return products(x.unsqueeze(1), data.expand(x.shape[0], -1, -1)).squeeze(1)
