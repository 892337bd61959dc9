"""Counts the bytes of weights and finds the caches that each layer of a model reads, by the engine's own model files.

`count_layers` runs one row through a model of sizes alone (`plan.counting`), layer by layer. Called by
`engine.library.stages`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from headrace import models
from headrace.models.config import ModelConfig
from headrace.plan.counting import NUM_POSITIONS, ONE_ROW, CountingOps, CountingWeights, cache_of
from headrace.plan.forms import Forms


class LayerReads(NamedTuple):
    """`num_bytes`: of weights that a layer reads for one row, experts that are not chosen left out. `caches`: indexes
    in `Model.cache_shapes` of the caches that it reads and writes, another layer's included."""

    num_bytes: float
    caches: frozenset[int]


class _Watched(list[Any]):
    """Caches of layers, and the places that were looked up."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__(caches)
        self.places: set[int] = set()

    def __getitem__(self, place: Any) -> Any:
        self.places.add(place)
        return super().__getitem__(place)


def count_layers(values: dict[str, Any], forms: Forms) -> tuple[list[LayerReads], float]:
    """Return the reads of each layer of the model of a config.json, and the bytes of the head's matrix.

    Raises `CheckpointError` as `plan.counting.count` does."""
    ops = CountingOps()
    model = models.find(values.get("model_type")).Model(ModelConfig(values), CountingWeights(forms), ops, NUM_POSITIONS)
    shapes = model.cache_shapes
    kv, reads = _Watched([cache_of(shape) for shape in shapes]), list[LayerReads]()

    def counted(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            ops.read, ops.mixtures, kv.places = {}, Counter(), set()
            x = layer(*args)
            sources = {shapes[place].source for place in kv.places} - {None}
            reads.append(LayerReads(_read(ops), frozenset(kv.places | sources)))
            return x

        return run

    model.layers = [counted(layer) for layer in model.layers]
    hidden = model.forward(ONE_ROW, kv)
    ops.read, ops.mixtures = {}, Counter()
    model.logits(hidden, None)
    return reads, _read(ops)


def _read(ops: CountingOps) -> float:
    chosen = sum(each.num_bytes * each.top_k / each.num * num for each, num in ops.mixtures.items())
    return chosen + sum(matrix.num_bytes for matrix in ops.read.values())
