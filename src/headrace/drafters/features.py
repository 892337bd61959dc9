"""Drafters that read the target's features: shared by `eagle` and `mtp`.

Row i of such a model has the target's features of position i and token i + 1, and predicts token i + 2. Features that
the target has computed wait here until the next token is known; for draft tokens the model reads its own features.
A sequence that was not observed from its beginning starts at its first observed position. Knows features and tokens;
must not know how a model uses them. Called by `drafters.speculator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Backend, Cache, Rows, SetUp
from headrace.backends.step import Chunks
from headrace.drafters.base import F32, Context, Target
from headrace.drafters.context import MAX_LINES, MAX_ROWS, LineRows
from headrace.drafters.grow import ModelDrafter
from headrace.models import Model
from headrace.protocol.speculation import SpeculativeConfig

MAX_WAITING = 256
"""Most rows that wait to be computed; the rows of a long prompt are computed as they come."""


class RowsOnly(Model):
    """The frame of a `Model` that reads features alone and keeps nothing between calls."""

    cache_shapes = ()
    layers = ()
    embedding = None
    head: Any = None

    def __init__(self, backend: Backend, feature_size: int, hidden_size: int, vocab_size: int) -> None:
        self.ops = backend.ops
        self.feature_size, self.hidden_size, self.vocab_size = feature_size, hidden_size, vocab_size

    def enter(self, rows: Rows) -> Array:
        return rows.features

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)


class RowProgram:
    """The program of a `RowsOnly` model. `feature_layers` as in `Backend.program`."""

    def __init__(self, model: Model, backend: Backend, num_threads: int, feature_layers: Sequence[int] = ()) -> None:
        set_up = SetUp(
            (1,), MAX_ROWS, backend.dtype, MAX_LINES, MAX_ROWS, max_blocks_per_seq=1, num_threads=num_threads
        )
        self._program = backend.program(model, set_up, feature_layers)

    def features(self, features: F32) -> F32:
        """Return the features [N, G] that the program computes from `features` [N, F]."""
        parts = []
        for i in range(0, len(features), MAX_ROWS):
            part = features[i : i + MAX_ROWS]
            rows = list(range(len(part)))
            self._program.forward(Chunks([0], [[0] * len(part)], [[0]], observed=rows), [], part)
            parts.append(self._program.features(rows))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def logits(self, features: F32) -> tuple[F32, list[bool]]:
        """Return logits [N, V] of `features` [N, F], valid until the next call, and whether each row is finite."""
        parts, finite = [], []
        for i in range(0, len(features), MAX_LINES):
            part = features[i : i + MAX_LINES]
            _, logits = self._program.forward(Chunks([0], [[0] * len(part)], [[0]]), list(range(len(part))), part)
            rows = logits.fetch()
            parts.append(rows if len(features) <= MAX_LINES else rows.copy())
            finite += logits.finite
        return parts[0] if len(parts) == 1 else np.concatenate(parts), finite

    def close(self) -> None:
        self._program.close()


@dataclass(slots=True, eq=False)
class Waiting:
    """Features of positions begin ... of a sequence, whose tokens are `ids`, which no line holds yet."""

    begin: int = 0
    ids: list[int] = field(default_factory=list)
    rows: list[F32] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.begin + len(self.ids)

    def put(self, ids: list[int], rows: F32) -> None:
        self.ids = self.ids + ids
        self.rows.append(rows.copy())

    def take(self, num: int) -> F32:
        """Remove and return the first `num` rows."""
        rows = self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)
        self.begin, self.ids, self.rows = self.begin + num, self.ids[num:], [rows[num:]] if num < len(rows) else []
        return rows[:num]


class FeatureDrafter(ModelDrafter):
    """`Drafter` over a model with `feature_size` features.

    Args:
        feature_layers: see `Drafter`.
        own_layers: features that the model's program keeps for the next draft token, as `Backend.program` takes it.
        window: rows of a sequence that are seen at most; a longer one starts over.
        token_ids: the target's id of each of the model's tokens; None if they are the same.
        fuse: turns the target's features into the model's, where these differ.
    """

    def __init__(
        self,
        model: Model,
        spec: SpeculativeConfig,
        target: Target,
        feature_layers: tuple[int, ...],
        own_layers: tuple[int, ...],
        window: int,
        token_ids: NDArray[np.int64] | None = None,
        fuse: RowProgram | None = None,
    ) -> None:
        super().__init__(model, target.backend, spec, target, window, True, own_layers, token_ids)
        self.feature_layers = feature_layers
        self._window = window
        self._fuse = fuse
        self._waiting: dict[int, Waiting] = {}

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        waiting = self._waiting.setdefault(seq_id, Waiting(start))
        if start > waiting.end:
            # The rows between were not observed.
            self._waiting[seq_id] = waiting = Waiting(start)
        num_known = waiting.end - start
        if num_known >= len(token_ids):
            return
        most = max(self._window // 2, 1)
        fresh = len(token_ids) - num_known
        if fresh > most:
            num_known = len(token_ids) - most
            self._waiting[seq_id] = waiting = Waiting(start + num_known)
        waiting.put(token_ids[num_known:], features[num_known:])
        if len(waiting.ids) > MAX_WAITING:
            job = self._job(seq_id, waiting, waiting.ids[1:], {seq_id})
            if job is None:
                del self._waiting[seq_id]
            else:
                self.private.extend([job])

    def job(self, context: Context, keep: set[int]) -> LineRows | None:
        waiting = self._waiting.get(context.seq_id)
        # The features before the last token must be there, and not be computed yet.
        if waiting is None or not waiting.ids or waiting.end != len(context.tokens) - 1:
            return None
        return self._job(context.seq_id, waiting, [*waiting.ids[1:], context.tokens[-1]], keep)

    def _job(self, seq_id: int, waiting: Waiting, token_ids: list[int], keep: set[int]) -> LineRows | None:
        """Return a job of the waiting rows, with the token after each, behind the sequence's line; None without
        room."""
        line = self.private.line(seq_id)
        if line.start + len(line.tokens) != waiting.begin or len(line.tokens) + len(token_ids) > self._window:
            # The line was dropped, or began elsewhere, or is full.
            self.private.empty(line, waiting.begin)
        if not self.private.reserve(line, len(token_ids), keep):
            return None
        rows = waiting.take(len(token_ids))
        return LineRows(line, token_ids, rows if self._fuse is None else self._fuse.features(rows))

    def drop(self, seq_id: int) -> None:
        self._waiting.pop(seq_id, None)
        super().drop(seq_id)

    def close(self) -> None:
        self._waiting.clear()
        super().close()
        if self._fuse is not None:
            self._fuse.close()


class Fusing(RowsOnly):
    """A model of one `matrix` over features of several layers side by side, normed or not (EAGLE-3's `fc`)."""

    def __init__(self, backend: Backend, matrix: Any, norm: Callable[[Array], Array] | None) -> None:
        super().__init__(backend, matrix.num_in, matrix.num_out, matrix.num_out)
        self._matrix, self._norm = matrix, norm

    def forward(self, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None) -> Array:
        features = rows.features if self._norm is None else self._norm(rows.features)
        fused = self.ops.linear(features, self._matrix)
        if streams is not None:
            streams.append(fused)
        return fused

    def logits(self, hidden: Array, rows: Array) -> Array:
        return self.final(hidden, rows)
