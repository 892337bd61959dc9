"""`AdapterSet`: the adapters that an engine has in memory, by digest, and the slot of each.

`AdaptableWeights` notes, while a model is built, which of its matrices may have adapters. Knows files by their readers
and slots; must not know requests. Called by `library.load`, by `engine.core` and by the runner.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.backends.adapters import Adapters
from headrace.backends.base import Array, Matrix
from headrace.checkpoint import adapters
from headrace.models.weights import Expert, Linear, Weights
from headrace.parallel.sharding import PartialWeights
from headrace.protocol.adapters import LoadedAdapter
from headrace.protocol.errors import CheckpointError, RequestError

logger = logging.getLogger(__name__)


class AdaptableWeights(PartialWeights):
    """`weights`, whose linear layers may have adapters: all but routers, single experts, and the head."""

    def __init__(self, weights: Weights, places: Adapters) -> None:
        super().__init__(weights)
        self._places = places

    def matrix(self, linear: Linear) -> Matrix:
        matrix = self._weights.matrix(linear)
        if not linear.plain and not isinstance(linear.cut, Expert):
            self._places.add(matrix, linear)
        return matrix

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        return self._weights.ends(embedding, head, shape, tied=tied)


class AdapterSet:
    """Adapters in the slots of a backend's `places`."""

    def __init__(self, places: Adapters) -> None:
        self._places = places
        self._slots: dict[str, int] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._slots

    def slot(self, digest: str) -> int:
        """Return the slot of an adapter, -1 if it is not loaded."""
        return self._slots.get(digest, -1)

    def load(self, path: str) -> LoadedAdapter:
        """Read the adapter in a folder, unless one with the same numbers is there. Raises `RequestError`."""
        directory = Path(path).expanduser()
        try:
            adapter = adapters.read(directory)
            if adapter.digest not in self._slots:
                slot = self._free()
                self._places.load(slot, adapter.layers)
                self._slots[adapter.digest] = slot
        except CheckpointError as error:
            raise RequestError("lora_path", path, f"an adapter that fits the model: {error}") from error
        logger.info("adapter %s: rank %d, %d layers, %s", path, adapter.rank, len(adapter.layers), adapter.digest[:12])
        return LoadedAdapter(adapter.digest, adapter.rank, len(adapter.layers), adapter.base)

    def unload(self, digest: str) -> bool:
        """Free the slot of an adapter that no sequence uses. Return whether it was there."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._places.clear(slot)
        return slot is not None

    def _free(self) -> int:
        used = set(self._slots.values())
        slot = next((slot for slot in range(self._places.num_slots) if slot not in used), None)
        if slot is None:
            bound = f"at most {self._places.num_slots} adapters in memory (max_loras); unload one first"
            raise RequestError("max_loras", self._places.num_slots, bound)
        return slot
