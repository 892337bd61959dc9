"""The reference backend's adapters. Knows tensors; must not know files. Called by `ops`, filled by `program`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.backends.adapters import Adapters, LayerAdapter, Place
from headrace.backends.tiles import rows_of_slots
from headrace.backends.torch_ref.rowwise import padded, products
from headrace.backends.torch_ref.tensors import tensor

if TYPE_CHECKING:
    from headrace.backends.step import Chunks


class RefAdapters(Adapters):
    """`rows`: of the current step, those of each slot."""

    def __init__(self, num_slots: int, max_rank: int, device: torch.device) -> None:
        super().__init__(num_slots, max_rank)
        self.device, self.rows = device, dict[int, Tensor]()
        # By matrix: of each slot the layers' places and weights, A [in, rank] and B [rank, out], in multiples of 16.
        self._layers: dict[Any, dict[int, list[tuple[Place, Tensor, Tensor, float]]]] = defaultdict(dict)

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
                of_matrix[slot] = [(place, a, b, scale * factor) for place, a, b, scale in of_matrix[source]]

    def _prepare(self, layer: LayerAdapter) -> tuple[Tensor, Tensor, float]:
        a, b = (_along(tensor(each).float().T, self.device) for each in (layer.a, layer.b))
        return a, b, layer.scale

    def _put(self, slot: int, place: Place, layer: tuple[Tensor, Tensor, float]) -> None:
        self._layers[place.matrix].setdefault(slot, []).append((place, *layer))

    def added(self, x: Tensor, matrix: Any, out: Tensor) -> Tensor:
        """Return the product `out` of x, float32, with what the adapters of its rows add."""
        layers = self._layers.get(matrix)
        if not layers or not self.rows:
            return out
        out = out.clone()
        for slot, rows in self.rows.items():
            for place, a, b, scale in layers.get(slot, ()):
                inner = _product(x[rows].float(), a) * scale
                out[rows, place.begin : place.begin + place.num_out] += _product(inner, b)[:, : place.num_out]
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
