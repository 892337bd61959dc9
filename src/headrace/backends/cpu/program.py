"""A model on the tape: recorded once when it is built, then every step is one native call.

Owns the step's inputs (small int arrays at fixed addresses), the logits, the cache and the tape. Knows chunks and block
tables; must not know requests. Called by `runner.runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Chunks, Logits
from headrace.backends.cpu.cache import KVCache
from headrace.backends.cpu.graph import ALIGN, LOGITS, ROWS, SEQS, Buffer, Node, Value
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.ops import CpuOps, StepRows
from headrace.backends.cpu.tape import Tape

logger = logging.getLogger(__name__)

MAX_DEPTH = 64
"""Draft tokens on a path of a tree; what several paths share is copied to the blocks of each."""

MAX_ROWS = 512
"""Rows of one native call. A longer step is computed in portions: reading the weights again costs less than the memory
for more rows, and what one operator passes to the next stays in the CPU's cache."""

F32 = NDArray[np.float32]


class TapedProgram:
    """`Program` of the cpu backend.

    Args:
        max_chunks: pieces of sequences in one call, and rows of logits.
        max_blocks: entries of all block tables of one call together.
        check: compute every step a second time beside torch_ref, and log what differs.
        layers: those whose residual streams `features` gives.
    """

    def __init__(
        self,
        model: Any,
        ops: CpuOps,
        cache: KVCache,
        max_rows: int,
        max_chunks: int,
        max_blocks: int,
        num_threads: int,
        isa: str = "",
        check: bool = False,
        layers: Sequence[int] = (),
    ) -> None:
        self.model = model  # it keeps the embedding table alive, whose address is on the tape
        self.cache, self.num_threads = cache, num_threads
        self.vocab_size: int = model.vocab_size
        self.block_size, self.num_blocks = cache.block_size, cache.num_blocks
        self._check = check
        self._has_copies = False
        self.max_rows, self.max_logits = max_rows, max_chunks
        ops.begin()
        graph = ops.graph
        size = model.feature_size
        # Features lie outside the arena: the caller's numbers are copied here before the run.
        features = Value(graph, Buffer(-(-4 * size // ALIGN) * ALIGN, ROWS, 0, 0), size) if size else None
        ld = features.ld if features else 0
        self._features = aligned(4 * max_rows * ld).view(np.float32).reshape(max_rows, ld)
        self.inputs = StepRows(
            token_ids=np.zeros(max_rows, np.int32),
            positions=np.zeros(max_rows, np.int32),
            slots=np.zeros(max_rows, np.int32),
            row_begin=np.zeros(max_chunks + 1, np.int32),
            start=np.zeros(max_chunks, np.int32),
            table_begin=np.zeros(max_chunks + 1, np.int32),
            blocks=aligned(4 * max_blocks).view(np.int32),
            copy_begin=np.zeros(max_rows + 1, np.int32),
            copy_slots=np.zeros(max_rows * (MAX_DEPTH + cache.block_size), np.int32),
            block_size=cache.block_size,
            max_rows=max_rows,
            features=features,
        )
        self.logit_rows = np.zeros(max_chunks, np.int32)
        self._finite_rows = np.zeros(max_rows, np.int32)
        self._finite_logits = np.zeros(max_chunks, np.int32)
        self._best_ids = np.zeros(max_chunks, np.int32)
        self._best_values = np.zeros(max_chunks, np.float32)
        streams: list[Value] = []
        hidden = model.forward(self.inputs, cache.layers, streams if layers else None)
        self._streams = [streams[layer] for layer in layers]
        fields = {"x": graph.read(hidden), "ld_x": hidden.ld, "width": hidden.width, "finite": self._finite_rows}
        graph.put("finite", ROWS, None, fields)
        self._num_forward = len(graph.nodes)
        logits: Value = model.logits(hidden, self.logit_rows)
        # Logits lie outside the arena: the caller reads them after the run.
        self._logits = aligned(4 * max_chunks * logits.ld).view(np.float32).reshape(max_chunks, logits.ld)
        graph.drop(logits.buffer)
        _place(graph.nodes[self._num_forward :], {id(logits.buffer): self._logits})
        if features is not None:
            _place(graph.nodes, {id(features.buffer): self._features})
        best = {"ids": self._best_ids, "values": self._best_values, "finite": self._finite_logits, "k": 1}
        graph.put("top_k", LOGITS, None, {"x": self._logits, "ld_x": logits.ld, "width": logits.width} | best)
        # The hidden states stay until the next step, for `logits` of other rows.
        for value in (hidden, *self._streams):
            graph.read(value)
        graph.drop_unread(ops.values)
        self.hidden = hidden
        self.tape = Tape(graph, {ROWS: max_rows, SEQS: max_chunks, LOGITS: max_chunks}, isa)
        ops.begin()
        self._ops, self._isa = ops, isa
        self._final: tuple[Tape, NDArray[np.float32]] | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_blocks(pairs)

    def forward(self, chunks: Chunks, rows: list[int], features: F32 | None = None) -> tuple[list[bool], Logits]:
        num_rows = self.fill(chunks)
        if features is not None:
            self._features[:num_rows, : self.model.feature_size] = features
        num_chunks = len(chunks.starts)
        self.logit_rows[: len(rows)] = rows
        dims = [num_rows, num_chunks, len(rows)]
        self.tape.run(dims, self.num_threads)
        if self._check:
            self._verify(dims)
        if self._finite_rows[:num_rows].all():
            finite = [True] * num_chunks
        else:
            begin = self.inputs.row_begin
            finite = [bool(self._finite_rows[begin[i] : begin[i + 1]].all()) for i in range(num_chunks)]
        return finite, self._take(len(rows))

    def _verify(self, dims: list[int]) -> None:
        from headrace.backends.cpu.verify import verify  # it imports torch

        for difference in verify(self.tape, dims):
            logger.error("record %d, %s: %s differs by %.2g", *astuple(difference))

    def logits(self, rows: list[int]) -> Logits:
        self.logit_rows[: len(rows)] = rows
        dims = [0, 0, len(rows)]
        self.tape.run_range(self._num_forward, len(self.tape.nodes), dims, self.num_threads)
        return self._take(len(rows))

    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        tape, out = self._final = self._final or self._record_final()
        self.logit_rows[: len(rows)] = rows
        tape.run([0, 0, len(rows)], self.num_threads)
        return out[: len(rows), : self.hidden.width]

    def _record_final(self) -> tuple[Tape, NDArray[np.float32]]:
        """Record select and final norm on a second tape, which reads the hidden states of the last step: on the step's
        tape they would run in each step, and few callers need them."""
        ops, most = self._ops, self.max_logits
        ops.begin()
        graph = ops.graph
        source = Value(graph, Buffer(self.hidden.buffer.row_bytes, ROWS, 0, 0), self.hidden.width)
        final: Value = self.model.final(source, self.logit_rows)
        out = aligned(4 * most * final.ld).view(np.float32).reshape(most, final.ld)
        places = {id(source.buffer): self.tape.floats(self.hidden.buffer, self.max_rows), id(final.buffer): out}
        _place(graph.nodes, places)
        graph.drop(final.buffer)
        tape = Tape(graph, {ROWS: self.max_rows, SEQS: most, LOGITS: most}, self._isa)
        ops.begin()
        return tape, out

    def features(self, rows: list[int]) -> F32:
        if self._streams:
            parts = [self.tape.floats(value.buffer, self.max_rows)[rows, : value.width] for value in self._streams]
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

    def fill(self, chunks: Chunks) -> int:
        """Write the step's ints to where the tape reads them; return the number of rows."""
        inputs, size = self.inputs, self.block_size
        at = blocks_at = 0
        for i, (start, token_ids, table) in enumerate(zip(chunks.starts, chunks.token_ids, chunks.tables, strict=True)):
            length = len(token_ids)
            stop = at + length
            needed = (start + length + size - 1) // size
            inputs.row_begin[i] = at
            inputs.start[i] = start
            inputs.table_begin[i] = blocks_at
            inputs.blocks[blocks_at : blocks_at + needed] = table[:needed]
            if length == 1:
                inputs.token_ids[at] = token_ids[0]
                inputs.positions[at] = start
                inputs.slots[at] = table[start // size] * size + start % size
            else:
                inputs.token_ids[at:stop] = token_ids
                positions = np.arange(start, start + length, dtype=np.int32)
                inputs.positions[at:stop] = positions
                block_ids = inputs.blocks[blocks_at : blocks_at + needed]
                inputs.slots[at:stop] = block_ids[positions // size] * size + positions % size
            at = stop
            blocks_at += needed
        self._fill_copies(chunks, at)
        inputs.row_begin[len(chunks.starts)] = at
        inputs.table_begin[len(chunks.starts)] = blocks_at
        return at

    def _fill_copies(self, chunks: Chunks, num_rows: int) -> None:
        begin, copies = self.inputs.copy_begin, chunks.copies
        if copies:
            rows = np.array([row for row, _ in copies])
            begin[: num_rows + 1] = np.searchsorted(rows, np.arange(num_rows + 1))
            self.inputs.copy_slots[: len(copies)] = [slot for _, slot in copies]
            self._has_copies = True
        elif self._has_copies:
            begin[:] = 0
            self._has_copies = False

    def _take(self, num_rows: int) -> Logits:
        finite = self._finite_logits[:num_rows].astype(bool) & (self._best_values[:num_rows] > -np.inf)
        return Logits(self._logits[:num_rows, : self.vocab_size], finite.tolist(), self._best_ids[:num_rows].tolist())


def _place(nodes: Sequence[Node], places: dict[int, F32]) -> None:
    """Put an array into each field that holds a buffer; `places` maps the id() of a buffer to its array."""
    for node in nodes:
        for name, value in node.fields.items():
            node.fields[name] = places.get(id(value), value)
