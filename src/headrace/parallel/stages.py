"""One rank's layers of a model: `Stage`, its weights, and the division of layers between ranks (ADR 0038).

The layers of other ranks are made without weights and never called; their caches take no memory, but every rank has the
kinds of all layers, so that one block table fits all ranks. Knows models, names and shapes; must not know formats or
processes. Called by `engine.library.stages`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Cache, LayerShape, Matrix, Rows
from headrace.backends.neighbours import Neighbours
from headrace.models import Model
from headrace.models.weights import ByHead, Linear, Weights
from headrace.parallel.sharding import PartialWeights
from headrace.protocol.errors import RequestError

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
"""The number of the layer in a tensor's name, which model files and checkpoints write alike."""


class StageSeat(NamedTuple):
    """A rank's place in a pipeline of `world` ranks. Rank 0 has the last layers, ranks 1, 2, ... the first, in order.

    hosts: for each rank the number of its host; if empty, all ranks share one."""

    rank: int
    world: int
    neighbours: Neighbours
    hosts: tuple[int, ...] = ()

    @property
    def place(self) -> int:
        """Return the number of the stage, in the order of layers."""
        return (self.rank - 1) % self.world


def divide(costs: Sequence[float], head: float, world: int, joined: Collection[tuple[int, int]] = ()) -> list[range]:
    """Return the layers of each stage: neighbouring ones, at least one, so that the greatest sum of `costs` of a stage
    is least. The last stage has the `head` too.

    joined: pairs of layers (first, last) between which no stage may begin. Raises `RequestError` where there are fewer
    places to begin than stages.
    """
    num = len(costs)
    begins = [at for at in range(1, num) if not any(first < at <= last for first, last in joined)]
    if world > len(begins) + 1:
        bound = f"at most {len(begins) + 1}, "
        bound += "for " if joined else ""
        bound += f"the {num} layers of the model"
        if joined:
            first, last = min(pair[0] for pair in joined), max(pair[1] for pair in joined)
            bound += f", of which those from {first} to {last} share caches and stay on one rank"
        raise RequestError("pipeline_parallel_size", world, bound)
    sums = [0.0, *itertools.accumulate(costs)]
    ends = [0, *begins, num]
    # best[i]: (greatest cost of a stage, where the stages begin) of the layers before ends[i]. Ties: the earlier place.
    best: list[tuple[float, tuple[int, ...]]] = [(sums[end], (0,)) for end in ends]
    for stage in range(1, world):
        more = head if stage == world - 1 else 0.0
        before = best
        best = [
            min(
                (
                    (max(before[j][0], sums[end] - sums[ends[j]] + more), (*before[j][1], ends[j]))
                    for j in range(stage, i)
                ),
                default=(math.inf, ()),
            )
            for i, end in enumerate(ends)
        ]
    starts = best[-1][1]
    return [range(first, end) for first, end in itertools.pairwise([*starts, num])]


def joined_layers(caches: Sequence[Collection[int]]) -> list[tuple[int, int]]:
    """Return, for each cache that several layers use, the first and the last of them. `caches`: the caches that each
    layer uses."""
    users: dict[int, list[int]] = {}
    for layer_id, places in enumerate(caches):
        for place in places:
            users.setdefault(place, []).append(layer_id)
    return [(min(ids), max(ids)) for ids in users.values() if len(ids) > 1]


@dataclass(frozen=True, slots=True, eq=False)
class AbsentMatrix:
    """A linear layer of another rank: its sizes without weights."""

    num_in: int
    num_out: int


class LeavingWeights(Weights, Protocol):
    """Weights some of which a model may leave to other processes (`checkpoint.reader.Reader`)."""

    def leave(self, is_left: Callable[[str], bool]) -> None: ...


class StageWeights(PartialWeights):
    """`weights` for the layers `layer_ids` of `num_layers`. Other layers are not read: their tensors are None, their
    numbers 0, their matrices sizes alone. The stage of the last layer has the head; each stage that looks tokens up has
    their table (`has_table`)."""

    def __init__(self, weights: LeavingWeights, layer_ids: range, num_layers: int, has_table: bool) -> None:
        super().__init__(weights)
        self._layer_ids, self._num_layers, self._has_table = layer_ids, num_layers, has_table
        self._leave = weights.leave
        weights.leave(self._is_absent)

    def _is_absent(self, name: str) -> bool:
        match = LAYER.search(f"{name}.")
        return match is not None and int(match[1]) < self._num_layers and int(match[1]) not in self._layer_ids

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        return None if self._is_absent(name) else super().tensor(name, shape)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32) if self._is_absent(name) else super().numbers(name, shape)

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        return None if self._is_absent(name) else super().table(name, shape)

    def matrix(self, linear: Linear) -> Matrix:
        if self._is_absent(linear.names[0]):
            return AbsentMatrix(linear.num_in, sum(linear.num_outs))
        return self._weights.matrix(linear)

    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        if not self._is_absent(name):
            return super().by_head(name, num_in, num_heads, key_dim, value_dim)
        keys: list[Matrix] = [AbsentMatrix(key_dim, num_in)] * num_heads
        values: list[Matrix] = [AbsentMatrix(num_in, value_dim)] * num_heads
        return ByHead(keys, values)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        if self._layer_ids.stop == self._num_layers:
            return self._weights.ends(embedding, head, shape, tied=tied)
        names = (f"{embedding}.", f"{head}.")
        self._leave(lambda part: f"{part}.".startswith(names))
        first = f"{embedding}.weight"
        if tied and not self.has(first) and self.has(f"{head}.weight"):
            first = f"{head}.weight"
        table = self._weights.table(first, shape) if self._has_table else None
        return table, AbsentMatrix(shape[1], shape[0])


class Stage(Model):
    """Layers `layer_ids` of the model `whole`, as a model. If they are not the first layers of `whole`, they take
    hidden rows as features; if they are not its last, there are no logits.

    Args:
        caches: for each layer of `whole` the indices of its entries in `cache_shapes`.
        shares: the layers of each stage.
        hosts: for each stage the number of its host.
    """

    def __init__(
        self,
        whole: Model,
        place: int,
        shares: Sequence[range],
        caches: Sequence[Collection[int]],
        hosts: Sequence[int],
        neighbours: Neighbours,
    ) -> None:
        self.whole, self.layer_ids, self.neighbours = whole, shares[place], neighbours
        self.ops, self.kinds = whole.ops, whole.kinds
        self.vocab_size, self.hidden_size = whole.vocab_size, whole.hidden_size
        self.embedding, self.head = whole.embedding, whole.head
        self.layers = whole.layers[self.layer_ids.start : self.layer_ids.stop]
        self.feature_size = whole.hidden_size if self.layer_ids.start else 0
        self.is_last = self.layer_ids.stop == len(whole.layers)
        every = [kept(whole.cache_shapes, {at for i in share for at in caches[i]}) for share in shares]
        self.cache_shapes: Sequence[LayerShape] = every[place]
        self.shapes_by_host = [
            [shape for shapes, host in zip(every, hosts, strict=True) if host == number for shape in shapes]
            for number in sorted(set(hosts))
        ]
        """The shapes of the caches of all ranks of a host, for each host."""

    def enter(self, rows: Rows) -> Array:
        return self.whole.enter(rows) if not self.layer_ids.start else rows.features

    def forward(self, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None) -> Array:
        return self.whole.through(self.layer_ids, self.enter(rows), rows, kv, streams)

    def logits(self, hidden: Array, rows: Array) -> Array:
        """As `Model.logits`; without the last layers, return the hidden rows, which are not used."""
        return self.whole.logits(hidden, rows) if self.is_last else self.ops.select(hidden, rows)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.whole.final(hidden, rows)


def kept(shapes: Sequence[LayerShape], places: Collection[int]) -> list[LayerShape]:
    """Return `shapes`, with empty ones outside `places`."""
    return [shape if at in places else LayerShape(0, 0, kind=shape.kind) for at, shape in enumerate(shapes)]
