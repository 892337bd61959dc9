"""A model on the tape: recorded once when it is built, then every step is one native call.

Owns the step's inputs (small int arrays at fixed addresses), the logits, the cache and the tape. Knows chunks and block
tables; must not know requests. Called by `runner.runner`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends import places
from headrace.backends.cpu.cache import KVCache
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.cpu.reads.final import FinalTape
from headrace.backends.cpu.reads.narrow import Reads
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import LOGITS, ROWS, SEQS, Value
from headrace.backends.step import Chunks, HostLogits, StepSizes, make_step_rows
from headrace.protocol.kinds import CacheKind

logger = logging.getLogger(__name__)

MAX_ROWS = 512
"""Rows of one native call. A longer step is computed in portions: reading the weights again costs less than the memory
for more rows, and the values that one operator passes to the next stay in the CPU's cache."""

F32 = NDArray[np.float32]


class TapeOptions(NamedTuple):
    """How a tape runs: on `num_threads` (0: the number that suits the model), by the kernels of `isa` ("": the best).
    check: compute each record of a step with torch_ref too, and log the differences; and, as with reads_all, all rows
    to the end, whatever is read."""

    num_threads: int
    isa: str = ""
    check: bool = False
    reads_all: bool = False


class TapedProgram:
    """`Program` of the cpu backend. layers: `features` gives the residual streams before these."""

    def __init__(
        self,
        model: Any,
        ops: CpuOps | RankOps,
        cache: KVCache,
        sizes: StepSizes,
        options: TapeOptions,
        layers: Sequence[int] = (),
    ) -> None:
        self.model = model  # keeps the embedding table alive, whose address is on the tape
        self.cache, self.num_threads = cache, options.num_threads
        self.vocab_size: int = model.vocab_size
        self.kinds: tuple[CacheKind, ...] = model.kinds
        self.block_size, self.pool_sizes = cache.block_size, cache.pool_sizes
        self.num_blocks = self.pool_sizes[0]
        self._check, isa = options.check, options.isa
        self.max_rows, self.max_logits = max_rows, max_chunks = sizes[:2]
        ops.begin()
        graph = ops.graph
        size = model.feature_size
        # Features lie outside the arena: the caller's numbers are copied here before the run.
        features = graph.outside(size, ROWS) if size else None
        ld = features.ld if features else 0
        self._features = aligned(4 * max_rows * ld).view(np.float32).reshape(max_rows, ld)
        self.inputs = make_step_rows(
            lambda size: aligned(4 * size).view(np.int32), self.kinds, cache.block_size, sizes, features,
            has_adapters=ops.adapters is not None, has_places=places.table_of(model) is not None,
            sees_wholes=model.sees_wholes,
        )  # fmt: skip
        if ops.adapters is not None:
            ops.adapters.rows = self.inputs
        self.logit_rows = np.zeros(max_chunks, np.int32)
        self._finite_rows = np.zeros(max_rows, np.int32)
        self._finite_logits = np.zeros(max_chunks, np.int32)
        self._best_ids = np.zeros(max_chunks, np.int32)
        self._best_values = np.zeros(max_chunks, np.float32)
        streams: list[Value] = []
        hidden = ops.whole(model.forward(self.inputs, cache.layers, streams if layers else None))
        self._streams = [ops.whole(streams[layer]) for layer in layers]
        fields = {"x": graph.read(hidden), "ld_x": hidden.ld, "width": hidden.width, "finite": self._finite_rows}
        graph.put("finite", ROWS, None, {"rows": None, "bound": math.inf} | fields)
        self.num_forward = len(graph.nodes)
        logits = ops.whole(model.logits(hidden, self.logit_rows))
        # Logits lie outside the arena: the caller reads them after the run.
        self._logits = aligned(4 * max_chunks * logits.ld).view(np.float32).reshape(max_chunks, logits.ld)
        graph.keep_outside(logits.buffer, self._logits)
        best = {"ids": self._best_ids, "values": self._best_values, "finite": self._finite_logits, "k": 1}
        graph.put("top_k", LOGITS, None, {"x": self._logits, "ld_x": logits.ld, "width": logits.width} | best)
        # The hidden states stay until the next step, for `logits` of other rows.
        for value in (hidden, *self._streams):
            graph.read(value)
        graph.drop_unread()
        self.hidden = hidden
        self.reads = Reads(ops, hidden, self._streams, self.inputs, self._finite_rows, self.num_forward)
        outside = {} if features is None else {features.buffer: self._features}
        for buffer, array in outside.items():
            graph.keep_outside(buffer, array)
        self._most = {ROWS: max_rows, SEQS: max_chunks, LOGITS: max_chunks}
        self.tape = Tape(graph, self._most, isa)
        if not (options.check or options.reads_all):
            self.reads.bind(ops, self.tape, outside, isa)
        ops.begin()
        self._ops, self._isa = ops, isa
        self._final: FinalTape | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        self.cache.copy_blocks(pairs, kind)

    def forward(self, chunks: Chunks, rows: list[int], features: F32 | None = None) -> tuple[list[bool], HostLogits]:
        dims = self.fill(chunks, rows, features)
        if self._check:
            self._verify(dims)
        else:
            self.reads.run(self.tape, len(self.tape.nodes), dims, self.num_threads)
        return self.reads.are_finite(), self.last_logits(len(rows))

    def hidden_rows(self, chunks: Chunks, features: F32 | None = None) -> tuple[list[bool], F32]:
        """Compute the chunks, without logits. Return whether the rows of each chunk are finite, and the hidden states
        [R, H] before the final norm of the rows that are read, by their places, valid until the next call."""
        dims = self.fill(chunks, [], features)
        self.reads.run(self.tape, self.num_forward, dims, self.num_threads)
        return self.reads.are_finite(), self.hidden_states_of(self.reads.num_read)

    def hidden_states_of(self, num_rows: int) -> F32:
        """Return the hidden states [R, H] at the first places of the last call, as they lie in memory."""
        return self.tape.floats(self.hidden.buffer, num_rows)[:, : self.hidden.width]

    def logits_of(self, hidden: F32, rows: list[int]) -> HostLogits:
        """Return the logits of some rows of hidden states [R, H], which replace the last call's hidden states."""
        self.reads.replace(len(hidden))
        self.hidden_states_of(len(hidden))[:] = hidden
        return self.logits(rows)

    def fill(self, chunks: Chunks, rows: list[int], features: F32 | None = None) -> list[int]:
        """Write the inputs of a step with the logits of `rows`, and return the sizes of its dimensions."""
        num_rows = self.inputs.fill(chunks)
        if chunks.places is not None and (table := places.table_of(self.model)) is not None:
            places.fill(self.inputs.rope_rows, chunks.places, table)
        if self.model.feature_size or features is not None:
            numbers = self.model.no_features if features is None else features
            self._features[:num_rows, : self.model.feature_size] = numbers
        self.reads.fill(chunks, rows, num_rows)
        self.logit_rows[: len(rows)] = self.reads.places(rows)
        return [num_rows, len(chunks.starts), len(rows)]

    def _verify(self, dims: list[int]) -> None:
        """Run the step record by record, instead of and not after a whole run: a state that is written in place would
        advance twice."""
        from headrace.backends.cpu.check.verify import verify  # it imports torch

        for difference in verify(self.tape, dims):
            logger.error("record %d, %s: %s differs by %.2g", *astuple(difference))

    def logits(self, rows: list[int]) -> HostLogits:
        self.logit_rows[: len(rows)] = self.reads.places(rows)
        self.tape.run_range(self.num_forward, len(self.tape.nodes), [0, 0, len(rows)], self.num_threads)
        return self.last_logits(len(rows))

    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        if self._final is None:
            states = self.tape.floats(self.hidden.buffer, self.max_rows)
            self._final = FinalTape(self._ops, self.model, self.hidden, states, self.logit_rows, self._most, self._isa)
        self.logit_rows[: len(rows)] = self.reads.places(rows)
        return self._final.run(len(rows), self.num_threads)

    def features(self, rows: list[int]) -> F32:
        if self._streams:
            parts = [self.reads.stream(self.tape, value, rows) for value in self._streams]
            return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        most = self.max_logits
        parts = [self.hidden_states(rows[i : i + most]).copy() for i in range(0, len(rows), most)]
        return np.concatenate(parts) if parts else np.empty((0, self.hidden.width), np.float32)

    def close(self) -> None:
        self.tape.close()
        self.reads.close()
        if self._final is not None:
            self._final.close()
            self._final = None
        self.cache.layers = []

    def last_logits(self, num_rows: int) -> HostLogits:
        """Return the first rows of logits of the last call."""
        finite = self._finite_logits[:num_rows].astype(bool) & (self._best_values[:num_rows] > -np.inf)
        return HostLogits(
            self._logits[:num_rows, : self.vocab_size], finite.tolist(), self._best_ids[:num_rows].tolist()
        )
