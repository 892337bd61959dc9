"""`AdapterSet`: the adapters that an engine has in memory, by digest, and the slot of each.

`AdaptableWeights` notes, while a model is built, which of its matrices may have adapters. Knows files by their readers
and slots; must not know requests. Called by `library.load`, by `engine.core` and by the runner.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.backends.adapters import Adapters, Prepared
from headrace.backends.base import Array, Matrix
from headrace.checkpoint import adapters
from headrace.checkpoint.gguf_adapters import Base
from headrace.models.config import ModelConfig
from headrace.models.weights import Expert, Linear, Weights
from headrace.parallel.sharding import PartialWeights
from headrace.protocol.adapters import LoadedAdapter, base_of, scale_of
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


def base_of_model(config: ModelConfig, places: Adapters) -> Base:
    """Return the facts about a model that readers of adapters need. Raises `CheckpointError`."""
    usual = config.integer("hidden_size", 1) // config.integer("num_attention_heads", 1)
    head_dim = config.integer("head_dim", max(1, usual))
    turned = int(head_dim * config.rope.number("partial_rotary_factor", 1.0))
    ordered = frozenset(name for name, place in places.places.items() if place.order is not None)
    return Base(str(config.values.get("model_type")), head_dim, turned, ordered)


class AdapterSet:
    """Adapters in the first `max_loras` slots of a backend's `places`. The others are for adapters with another scale,
    which share the weights of theirs: there must be as many as a step and the one before it may have sequences."""

    def __init__(self, places: Adapters, max_loras: int, config: ModelConfig | None = None) -> None:
        self._places, self._max_loras = places, max_loras
        self._base = None if config is None else base_of_model(config, places)
        self._slots: dict[str, int] = {}
        # Those with another scale by their names, the least recently used first.
        self._scaled: dict[str, int] = {}

    def __contains__(self, adapter: str) -> bool:
        return base_of(adapter) in self._slots and scale_of(adapter) is not None

    def slot(self, adapter: str) -> int:
        """Return the slot of an adapter, -1 if it is not loaded."""
        if adapter in self._slots:
            return self._slots[adapter]
        source, scale = self._slots.get(base_of(adapter)), scale_of(adapter)
        if source is None or scale is None:
            return -1
        slot = self._scaled.pop(adapter, None)
        if slot is None:
            slot = self._free_scaled()
            self._places.share(slot, source, scale)
        self._scaled[adapter] = slot
        return slot

    def read(self, path: str) -> tuple[LoadedAdapter, Prepared]:
        """Read the adapter at `path`, and hash and convert its numbers. Changes nothing, so any thread may call it.
        Raises `RequestError`."""
        try:
            adapter = adapters.read(Path(path).expanduser(), self._base)
            prepared = self._places.prepare(adapter.layers)
        except CheckpointError as error:
            raise RequestError("lora_path", path, f"an adapter that fits the model: {error}") from error
        return LoadedAdapter(adapter.digest, adapter.rank, len(adapter.layers), adapter.base, path), prepared

    def put(self, adapter: LoadedAdapter, prepared: Prepared) -> None:
        """Put an adapter that was read into a slot, unless one with the same numbers is there. Raises
        `RequestError`."""
        if adapter.digest not in self._slots:
            slot = self._free()
            self._places.load(slot, prepared)
            self._slots[adapter.digest] = slot
        path, digest = adapter.path, adapter.digest[:12]
        logger.info("adapter %s: rank %d, %d layers, %s", path, adapter.rank, adapter.num_layers, digest)

    def unload(self, digest: str) -> bool:
        """Free the slot of an adapter that no sequence uses. Return whether it was there."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            return False
        self._places.clear(slot)
        for name in [name for name in self._scaled if base_of(name) == digest]:
            self._places.clear(self._scaled.pop(name))
        return True

    def _free(self) -> int:
        used = set(self._slots.values())
        slot = next((slot for slot in range(self._max_loras) if slot not in used), None)
        if slot is None:
            bound = f"at most {self._max_loras} adapters in memory (max_loras); unload one first"
            raise RequestError("max_loras", self._max_loras, bound)
        return slot

    def _free_scaled(self) -> int:
        used = set(self._scaled.values())
        slot = next((slot for slot in range(self._max_loras, self._places.num_slots) if slot not in used), None)
        return self._scaled.pop(next(iter(self._scaled))) if slot is None else slot
