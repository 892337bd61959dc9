"""`Reads` cuts a recorded forward pass behind its last write to memory that outlives the step.

Keys, values and states are written of every row. What is computed from there on, such as the attention, the output and
the MLP of the last layer, is needed of the rows alone whose logits, hidden states or features somebody reads: the
records behind the cut get the dimension READ, and copies of the rows that are read of all values that cross it. An
UNREAD row is judged by what it has written, and by the values that cross. Knows nodes and their fields; must not know
models. Called by `program`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.cache import TYPE_NAMES
from headrace.backends.cpu.gathers import NO_CODES, NO_TARGETS
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.graph import READ, ROWS, UNREAD, Buffer, Node, Value
from headrace.backends.reads import ReadRows
from headrace.backends.step import Chunks, StepRows

Ints = NDArray[np.int32]

WRITERS = {"rope_store": "k", "conv": "state", "delta": "state", "scan": "state"}
"""Operators that write memory that outlives a step, and the field that has it: None where one writes nothing there."""
BY_ROW = frozenset(
    "embedding select_rows rms_norm layer_norm add softcap quantize activation xielu gated multiply scale softplus "
    "permute spread linear_i4 linear_i5 linear_i6 linear_i8 linear_k linear_w linear_f linear_each route moe_group "
    "moe_gather moe_combine gather".split()
)
"""Operators that compute each row by itself. Of the others, `attention` takes any rows that follow each other."""

BOUNDS = {"float16": 65520.0, "fp8_e5m2": 61440.0, "bfloat16": math.ldexp(511, 119), "int4": math.ldexp(1, 126)}
"""From here on a cache of the type holds infinity; int4 has its numbers' span in bfloat16. The others scale numbers."""


class Reads:
    """The rows that are read of each call, as the records behind the cut find them, and whether all rows are finite.

    hidden: the hidden states of the rows that are read, by their places. num_stored: the number of records that a call
    needs of which no row is read: sizes that operators write are then left from earlier layers.
    """

    def __init__(
        self, ops: CpuOps | RankOps, hidden: Value, streams: Sequence[Value], inputs: StepRows, *, cuts: bool
    ) -> None:
        """For a forward pass that `ops` has recorded, which gives `hidden` and `streams`. cuts: without it, and where
        nothing is written that outlives a step, all rows are read."""
        most, num_chunks = inputs.max_rows, len(inputs.start)
        self.rows, self.unread = np.arange(most, dtype=np.int32), np.zeros(most, np.int32)
        self.inputs = replace(
            inputs, token_ids=np.zeros(most, np.int32), positions=np.zeros(most, np.int32),
            row_begin=np.zeros(num_chunks + 1, np.int32), start=np.zeros(num_chunks, np.int32),
        )  # fmt: skip
        self.every, self.hidden, self.num_stored = inputs, hidden, 0
        self.flags: list[Ints] = []
        self.is_cut = cuts and narrow(ops, self)
        graph, hidden, self._finite = ops.graph, self.hidden, np.zeros(most, np.int32)
        fields = {"rows": None, "x": graph.read(hidden), "ld_x": hidden.ld, "width": hidden.width, "bound": math.inf}
        graph.put("finite", hidden.dim, None, fields | {"finite": self._finite})
        # Streams from before the cut are there of all rows.
        self._with_observed = not streams or any(value.dim == READ for value in streams)
        self.read = ReadRows(Chunks([], [], []))
        self._is_plain = True

    def fill(self, chunks: Chunks, rows: Sequence[int]) -> int:
        """Write the rows that are read of a call whose inputs are written, and return their number."""
        self.read = read = ReadRows(
            chunks if self.is_cut else chunks.all_read(), rows, with_observed=self._with_observed
        )
        here, every, num, num_chunks = self.inputs, self.every, read.num_read, len(chunks.starts)
        if not self.is_cut:
            return num
        here.row_begin[: num_chunks + 1] = read.begins
        if read.is_whole:
            if not self._is_plain:
                self.rows[:] = np.arange(len(self.rows), dtype=np.int32)
            here.start[:num_chunks] = chunks.starts
            here.positions[:num], here.token_ids[:num] = every.positions[:num], every.token_ids[:num]
        else:
            rows_read, unread = read.rows(), read.unread()
            self.rows[:num], self.unread[: len(unread)] = rows_read, unread
            here.start[:num_chunks] = np.add(chunks.starts, np.subtract(read.firsts, every.row_begin[:num_chunks]))
            here.positions[:num], here.token_ids[:num] = every.positions[rows_read], every.token_ids[rows_read]
        self._is_plain = read.is_whole
        return num

    def replace(self, num_rows: int) -> None:
        """Take the hidden states at the first places for those of a call of so many rows."""
        self.read = ReadRows(Chunks([0], [[0] * num_rows], []).all_read())

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return where rows lie among those that are read. Raises ValueError for another row."""
        return self.read.places(rows)

    def places_in(self, value: Value, rows: Sequence[int]) -> Sequence[int]:
        """Return where rows lie in a value of the forward pass. Raises ValueError for a row that is not there."""
        if value.dim == READ:
            return self.read.places(rows)
        self.read.check(rows)
        return rows

    def are_finite(self) -> list[bool]:
        """Return for each chunk of the last call whether its rows are finite: at the end, or where they were left."""
        num = self.read.num_unread
        unread = np.ones(num, np.bool_)
        for flags in self.flags if num else ():
            unread &= flags[:num].reshape(num, -1).all(axis=1)
        return self.read.all_of_chunks(self._finite[: self.read.num_read], unread)


def narrow(ops: CpuOps | RankOps, reads: Reads) -> bool:
    """Cut the graph of `ops`. Return False where nothing is written that outlives a step.

    Raises ValueError for a record behind the last write that is not known to compute its rows each by itself.
    """
    graph, hidden, inputs = ops.graph, reads.hidden, reads.every
    nodes = list(graph.nodes)
    last = max((node.index for node in nodes if is_write(node)), default=None)
    if last is None:
        return False
    before, behind = nodes[: last + 1], nodes[last + 1 :]
    known = {buffer for node in before for buffer in buffers_of(node.fields)}
    used = dict.fromkeys(buffer for node in behind for buffer in buffers_of(node.fields))
    used[hidden.buffer] = None
    crossing = [buffer for buffer in used if buffer in known or buffer not in graph.buffers]
    for node in behind:
        if not (node.op in BY_ROW or node.op == "attention" or (node.op in WRITERS and not is_write(node))):
            raise ValueError(f"{node.op} behind the last write: are its rows computed each by itself?")
    if any(buffer.dim != ROWS for buffer in crossing):
        raise ValueError("a value of other than a step's rows crosses the last write")
    lives = {buffer: buffer.last for buffer in crossing}
    del graph.nodes[last + 1 :]
    check(ops, nodes[last], crossing, reads)
    reads.num_stored = len(graph.nodes)
    moved: dict[Any, Any] = {}
    for buffer in crossing:
        width, copy = buffer.row_bytes // 4, Buffer(buffer.row_bytes, READ, len(graph.nodes), lives[buffer])
        fields = {"rows": reads.rows, "x": graph.touch(buffer), "ld_x": width, "width": width}
        graph.put("select_rows", READ, None, fields | {"out": copy, "ld_out": width})
        moved[buffer] = copy
    shift = len(graph.nodes) - len(before)
    for buffer in used:
        if buffer in moved:
            buffer = moved[buffer]
            graph.buffers[buffer] = None
        else:
            buffer.first += shift
            buffer.dim = READ if buffer.dim == ROWS else buffer.dim
        buffer.last += shift
    by_row = ("token_ids", "positions", "row_begin", "start")
    moved |= {id(getattr(inputs, name)): getattr(reads.inputs, name) for name in by_row}
    for node in behind:
        node.index += shift
        node.dim = READ if node.dim == ROWS else node.dim
        node.fields = {name: with_moved(value, moved) for name, value in node.fields.items()}
        graph.nodes.append(node)
    if hidden.buffer in moved:
        reads.hidden = replace(hidden, buffer=moved[hidden.buffer], node=None, codes={})
    return True


def is_write(node: Node) -> bool:
    return node.op in WRITERS and node.fields[WRITERS[node.op]] is not None


def check(ops: CpuOps | RankOps, write: Node, crossing: Sequence[Buffer], reads: Reads) -> None:
    """Record whether what each unread row wrote last, as the cache holds it, and the values that cross are finite."""
    graph, fields = ops.graph, write.fields
    names = ("heads", "kv_heads", "head_dim", "value_dim")
    heads, kv_heads, key_dim, value_dim = (fields.get(name, 0) for name in names)
    if write.op == "rope_store":
        given, ld, first = fields["x"], fields["ld_x"], heads * key_dim
        width = kv_heads * (key_dim + (0 if fields["v"] is None else value_dim))
        bound = BOUNDS.get(TYPE_NAMES[fields["kv_type"]], math.inf)
    else:
        given, ld, first, bound = fields["out"], fields["ld_out"], 0, math.inf
        width = fields["width"] if write.op == "conv" else heads * value_dim
    (buffer,) = buffers_of({"": given})
    column = given[2] if isinstance(given, tuple) else 0
    put_check(ops, reads, ("column", buffer, column + first), ld, width, bound)
    if isinstance(ops, RankOps):
        # Each rank wrote some heads alone, and all of them must judge alike.
        reads.flags[-1] = gathered(ops, reads.flags[-1])
    widths: dict[Buffer, int] = {}
    for value in graph.values:
        widths[value.buffer] = max(widths.get(value.buffer, 0), value.column + value.width)
    for other in crossing:
        if other is not buffer and other in widths:
            put_check(ops, reads, other, other.row_bytes // 4, widths[other], math.inf)


def put_check(ops: CpuOps | RankOps, reads: Reads, x: Any, ld: int, width: int, bound: float) -> None:
    flags = np.zeros(len(reads.rows), np.int32)
    for buffer in buffers_of({"": x}):
        ops.graph.touch(buffer)
    fields = {"rows": reads.unread, "x": x, "ld_x": ld, "width": width, "bound": bound, "finite": flags}
    ops.graph.put("finite", UNREAD, None, fields)
    reads.flags.append(flags)


def gathered(ops: RankOps, flags: Ints) -> Ints:
    """Record a gather of one number for each unread row, and return those of all ranks [R, world]."""
    world = ops.plan.world
    every, spans = np.zeros((len(flags), world), np.int32), [(rank, 0, rank, 1) for rank in range(world)]
    fields = ops.gathers.fields(spans, world, 4 * world)
    fields |= {"x": flags, "ld_x": 1, "out": every, "ld_out": world} | NO_CODES | NO_TARGETS
    ops.graph.put("gather", UNREAD, None, fields)
    return every


def buffers_of(fields: Mapping[str, Any]) -> Iterator[Buffer]:
    """Yield the buffers in some fields."""
    for value in fields.values():
        if isinstance(value, Buffer):
            yield value
        elif isinstance(value, tuple) and value[0] == "column":
            yield value[1]
        elif isinstance(value, tuple):
            for call in value[2]:
                yield from buffers_of(call)


def with_moved(value: Any, moved: Mapping[Any, Any]) -> Any:
    """Return a field's value with other buffers, and other arrays of the step."""
    if isinstance(value, Buffer):
        return moved.get(value, value)
    if isinstance(value, np.ndarray):
        return moved.get(id(value), value)
    if not isinstance(value, tuple):
        return value
    kind, what, rest = value
    if kind == "column":
        return kind, moved.get(what, what), rest
    return kind, what, [{name: with_moved(part, moved) for name, part in call.items()} for call in rest]
