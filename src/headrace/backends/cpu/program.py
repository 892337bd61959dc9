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

from headrace.backends.cpu.cache import KVCache
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.cpu.reads.narrow import narrow
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import LOGITS, READ, ROWS, SEQS, UNREAD, Value
from headrace.backends.reads import ReadRows
from headrace.backends.step import Chunks, HostLogits, StepSizes, make_step_rows
from headrace.protocol.kinds import CacheKind

logger = logging.getLogger(__name__)

MAX_ROWS = 512
"""Rows of one native call. A longer step is computed in portions: reading the weights again costs less than the memory
for more rows, and the values that one operator passes to the next stay in the CPU's cache."""

F32 = NDArray[np.float32]


class TapeOptions(NamedTuple):
    """How a tape runs: on `num_threads` (0: the number that suits the model), by the kernels of `isa` ("": the best).
    check: compute each record of a step with torch_ref too, and log the differences. reads_all: compute all rows to
    the end, whatever is read."""

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
            lambda size: aligned(4 * size).view(np.int32), self.kinds, cache.block_size, sizes, features
        )  # fmt: skip
        self.logit_rows = np.zeros(max_chunks, np.int32)
        self._finite_rows = np.zeros(max_rows, np.int32)
        self._finite_logits = np.zeros(max_chunks, np.int32)
        self._best_ids = np.zeros(max_chunks, np.int32)
        self._best_values = np.zeros(max_chunks, np.float32)
        streams: list[Value] = []
        hidden = ops.whole(model.forward(self.inputs, cache.layers, streams if layers else None))
        self._streams = [ops.whole(streams[layer]) for layer in layers]
        self._narrowed = None if options.reads_all else narrow(ops, hidden, self.inputs)
        self.num_stored = 0
        if self._narrowed is not None:
            hidden, self.num_stored = self._narrowed.hidden, self._narrowed.num_stored
        self.read, self._is_read = ReadRows(Chunks([], [], [])), False
        fields = {"x": graph.read(hidden), "ld_x": hidden.ld, "width": hidden.width, "finite": self._finite_rows}
        graph.put("finite", hidden.dim, None, {"rows": None, "bound": math.inf} | fields)
        self.num_forward = len(graph.nodes)
        logits = ops.whole(model.logits(hidden, self.logit_rows))
        # Logits lie outside the arena: the caller reads them after the run.
        self._logits = aligned(4 * max_chunks * logits.ld).view(np.float32).reshape(max_chunks, logits.ld)
        graph.keep_outside(logits.buffer, self._logits)
        if features is not None:
            graph.keep_outside(features.buffer, self._features)
        best = {"ids": self._best_ids, "values": self._best_values, "finite": self._finite_logits, "k": 1}
        graph.put("top_k", LOGITS, None, {"x": self._logits, "ld_x": logits.ld, "width": logits.width} | best)
        # Features are those of the rows that are read, unless all of them are streams from before the cut.
        self._observes_read = not layers or any(value.dim == READ for value in self._streams)
        # The hidden states stay until the next step, for `logits` of other rows.
        for value in (hidden, *self._streams):
            graph.read(value)
        graph.drop_unread()
        self.hidden = hidden
        self._most = {ROWS: max_rows, SEQS: max_chunks, LOGITS: max_chunks, READ: max_rows, UNREAD: max_rows}
        self.tape = Tape(graph, self._most, isa)
        ops.begin()
        self._ops, self._isa = ops, isa
        self._final: tuple[Tape, NDArray[np.float32]] | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        self.cache.copy_blocks(pairs, kind)

    def forward(self, chunks: Chunks, rows: list[int], features: F32 | None = None) -> tuple[list[bool], HostLogits]:
        dims = self.fill(chunks, rows, features)
        if self._check:
            self._verify(dims)
        elif self._is_read:
            self.tape.run(dims, self.num_threads)
        else:
            self.tape.run_range(0, self.num_stored, dims, self.num_threads)
        return self._are_finite(), self.last_logits(len(rows))

    def hidden_rows(self, chunks: Chunks, features: F32 | None = None) -> tuple[list[bool], F32]:
        """Compute the chunks, without logits. Return whether the rows of each chunk are finite, and the hidden states
        [R, H] before the final norm of the rows that are read, by their places, valid until the next call."""
        dims = self.fill(chunks, (), features)
        self.tape.run_range(0, self.num_forward if self._is_read else self.num_stored, dims, self.num_threads)
        return self._are_finite(), self.hidden_states_of(self.read.num_read)

    def hidden_states_of(self, num_rows: int) -> F32:
        """Return the hidden states [R, H] at the first places of the last call, as they lie in memory."""
        return self.tape.floats(self.hidden.buffer, num_rows)[:, : self.hidden.width]

    def logits_of(self, hidden: F32, rows: list[int]) -> HostLogits:
        """Return the logits of some rows of hidden states [R, H], which replace the last call's hidden states."""
        self.read = ReadRows(Chunks([0], [[0] * len(hidden)], []).all_read())
        self.hidden_states_of(len(hidden))[:] = hidden
        return self.logits(rows)

    def fill(self, chunks: Chunks, rows: Sequence[int], features: F32 | None = None) -> list[int]:
        """Write the inputs of a step with the logits of `rows`, and return the sizes of its dimensions."""
        num_rows = self.inputs.fill(chunks)
        if features is not None:
            self._features[:num_rows, : self.model.feature_size] = features
        if self._narrowed is None:
            chunks = chunks.all_read()
        self.read = read = ReadRows(chunks, rows, with_observed=self._observes_read)
        if self._narrowed is not None:
            self._narrowed.fill(chunks.starts, read)
        self.logit_rows[: len(rows)] = read.places(rows)
        # Sizes that operators write are left from earlier layers where no row is read.
        self._is_read = read.num_read > 0
        return [num_rows, len(chunks.starts), len(rows), read.num_read, read.num_unread]

    def _are_finite(self) -> list[bool]:
        read = self.read
        unread = () if read.is_whole or self._narrowed is None else self._narrowed.sound(read.num_unread)
        return read.all_of_chunks(self._finite_rows[: read.num_read], unread)

    def _verify(self, dims: list[int]) -> None:
        """Run the step record by record, instead of and not after a whole run: a state that is written in place would
        advance twice."""
        from headrace.backends.cpu.verify import verify  # it imports torch

        for difference in verify(self.tape, dims, None if self._is_read else self.num_stored):
            logger.error("record %d, %s: %s differs by %.2g", *astuple(difference))

    def logits(self, rows: list[int]) -> HostLogits:
        self.logit_rows[: len(rows)] = self.read.places(rows)
        dims = [0, 0, len(rows), 0, 0]
        self.tape.run_range(self.num_forward, len(self.tape.nodes), dims, self.num_threads)
        return self.last_logits(len(rows))

    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        tape, out = self._final = self._final or self._record_final()
        self.logit_rows[: len(rows)] = self.read.places(rows)
        tape.run([0, 0, len(rows), 0, 0], self.num_threads)
        return out[: len(rows), : self.hidden.width]

    def _record_final(self) -> tuple[Tape, NDArray[np.float32]]:
        """Record select and final norm on a second tape, which reads the hidden states of the last step: on the step's
        tape they would run in each step, and few callers need them."""
        ops, most = self._ops, self.max_logits
        ops.begin()
        graph = ops.graph
        source = graph.outside(self.hidden.width, ROWS, self.hidden.buffer.row_bytes)
        final = ops.whole(self.model.final(source, self.logit_rows))
        out = aligned(4 * most * final.ld).view(np.float32).reshape(most, final.ld)
        graph.keep_outside(source.buffer, self.tape.floats(self.hidden.buffer, self.max_rows))
        graph.keep_outside(final.buffer, out)
        tape = Tape(graph, self._most, self._isa)
        ops.begin()
        return tape, out

    def features(self, rows: list[int]) -> F32:
        if self._streams:
            self.read.check(rows)
            parts = []
            for value in self._streams:
                places = self.read.places(rows) if value.dim == READ else rows
                parts.append(self.tape.floats(value.buffer, self.max_rows)[places, : value.width])
            return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        most = self.max_logits
        parts = [self.hidden_states(rows[i : i + most]).copy() for i in range(0, len(rows), most)]
        return np.concatenate(parts) if parts else np.empty((0, self.hidden.width), np.float32)

    def close(self) -> None:
        self.tape.close()
        if self._final is not None:
            self._final[0].close()
            self._final = None
        self.cache.layers = []

    def last_logits(self, num_rows: int) -> HostLogits:
        """Return the first rows of logits of the last call."""
        finite = self._finite_logits[:num_rows].astype(bool) & (self._best_values[:num_rows] > -np.inf)
        return HostLogits(
            self._logits[:num_rows, : self.vocab_size], finite.tolist(), self._best_ids[:num_rows].tolist()
        )
