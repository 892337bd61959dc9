"""`Reads` cuts a recorded forward pass behind its last write to memory that outlives the step.

Keys, values and states are written of every row. What is computed from there on, such as the attention, the output and
the MLP of the last layer, is needed of the rows alone whose logits, hidden states or features somebody reads. So the
records behind the cut are on a second tape once more, for a call of which not all rows are read: there they read copies
of these rows of all values that cross the cut. The other rows are judged by what they have written, and by the values
that cross. Knows nodes and their fields; must not know models. Called by `program`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.cache import TYPE_NAMES
from headrace.backends.cpu.gathers import NO_CODES, NO_TARGETS
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import LOGITS, ROWS, SEQS, Buffer, Graph, Node, Value
from headrace.backends.reads import ReadRows
from headrace.backends.step import Chunks, StepRows

Ints = NDArray[np.int32]

WRITERS = {"rope_store": "k", "conv": "state", "delta": "state", "scan": "state"}
"""Operators that write memory that outlives a step, and the field that has it: None where one writes nothing there."""
BY_ROW = frozenset(
    "embedding select_rows rms_norm layer_norm add softcap quantize activation xielu gated multiply scale softplus "
    "permute spread linear_i4 linear_i5 linear_i6 linear_i8 linear_k linear_w linear_f linear_each route moe_group "
    "moe_gather moe_combine gather adapt_in adapt_out".split()
)
"""Operators that compute each row by itself. Of the others, `attention` takes any rows that follow each other."""

BOUNDS = {"float16": 65520.0, "fp8_e5m2": 61440.0, "bfloat16": math.ldexp(511, 119), "int4": math.ldexp(1, 126)}
"""From here on a cache of the type holds infinity; int4 has its numbers' span in bfloat16. The others scale numbers."""


class Reads:
    """The rows that are read of each call: which of them, where they lie, how they are computed."""

    def __init__(
        self,
        ops: CpuOps | RankOps,
        hidden: Value,
        streams: Sequence[Value],
        inputs: StepRows,
        finite: Ints,
        num_forward: int,
    ) -> None:
        """For the forward pass in the first `num_forward` records of `ops`, which gives `hidden` and `streams`, and
        last for each row of hidden states whether it is `finite`."""
        most, num_chunks = inputs.max_rows, len(inputs.start)
        self.rows, self._unread, self._ids = np.zeros(most, np.int32), np.zeros(most, np.int32), list(range(most))
        self._every, self._hidden, self._finite = inputs, hidden, finite
        positions = np.zeros(most, np.int32)
        self.here = replace(
            inputs, token_ids=np.zeros(most, np.int32), positions=positions,
            rope_rows=positions if inputs.rope_rows is inputs.positions else np.zeros(most, np.int32),
            row_begin=np.zeros(num_chunks + 1, np.int32), start=np.zeros(num_chunks, np.int32),
            seen=None if inputs.seen is None else np.zeros(most, np.int32),
            adapted=None if inputs.adapted is None else np.zeros(1 + 3 * most, np.int32),
            adapted_rows=None if inputs.adapted is None else np.zeros(most, np.int32),
        )  # fmt: skip
        self._flags: list[Ints] = []
        self.second: Tape | None = None
        self._num_checks, self.num_stored, self._num_forward = 0, 0, num_forward
        self._chunks, self.num_rows = Chunks([], [], []), 0
        self._read: ReadRows | None = None
        self._cut = Cut.of(ops.graph, ops.graph.nodes[: num_forward - 1], hidden)
        behind = () if self._cut is None else self._cut.inner
        self._narrow_streams = {value.buffer for value in streams if value.buffer in behind}
        # Streams from before the cut are there of all rows.
        self._with_observed = not streams or bool(self._narrow_streams)

    def bind(self, ops: CpuOps | RankOps, tape: Tape, outside: Mapping[Buffer, NDArray[Any]], isa: str) -> None:
        """Make the second tape beside `tape`, which has the whole forward pass. outside: arrays of buffers that lie
        outside its arena. Without it all rows of each call are computed to the end."""
        cut, most = self._cut, len(self._ids)
        if cut is None:
            return
        self.num_stored = cut.num_stored

        def place(buffer: Buffer) -> NDArray[Any]:
            array = outside.get(buffer)
            return tape.floats(buffer, most) if array is None else array

        graph = Graph(ops.graph.item_bytes)
        graph.pairs_of_row = tape.graph.pairs_of_row
        for buffer, column, ld, width, bound in cut.checks:
            flags = np.zeros(most, np.int32)
            fields = {"rows": self._unread, "x": place(buffer).reshape(-1)[column:], "ld_x": ld, "width": width}
            graph.put("finite", ROWS, None, fields | {"bound": bound, "finite": flags})
            if isinstance(ops, RankOps) and not self._flags:
                # Each rank wrote some heads alone, and all of them must judge alike.
                flags = gathered(graph, ops, flags)
            self._flags.append(flags)
        self._num_checks = len(graph.nodes)
        moved: dict[Any, Any] = {}
        for buffer in cut.crossing:
            width, copy = buffer.row_bytes // 4, graph.buffer(buffer.row_bytes, ROWS)
            fields = {"rows": self.rows, "x": place(buffer), "ld_x": width, "width": width}
            graph.put("select_rows", ROWS, None, fields | {"out": copy, "ld_out": width})
            moved[buffer] = copy
        outputs = {self._hidden.buffer, *self._narrow_streams}
        for buffer in cut.inner:
            moved[buffer] = place(buffer) if buffer in outputs else graph.buffer(buffer.row_bytes, buffer.dim)
        by_row = ("token_ids", "positions", "rope_rows", "row_begin", "start", "adapted", "adapted_rows", "seen")
        moved |= {id(getattr(self._every, name)): getattr(self.here, name) for name in by_row}
        for node, before in cut.behind:
            fields = {name: with_moved(value, moved) for name, value in before.items()}
            graph.put(node.op, node.dim, None, fields, note=node.note, read_bytes=node.read_bytes, row_ops=node.row_ops)
        hidden = self._hidden
        fields = {"rows": None, "x": place(hidden.buffer), "ld_x": hidden.ld, "width": hidden.width}
        graph.put("finite", ROWS, None, fields | {"bound": math.inf, "finite": self._finite})
        for buffer in graph.buffers:
            buffer.first = len(graph.nodes)
        for node in graph.nodes:
            for buffer in buffers_of(node.fields):
                buffer.first, buffer.last = min(buffer.first, node.index), node.index
        self.second = Tape(graph, {ROWS: most, SEQS: len(self.here.start), LOGITS: 0}, isa)

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the last call are read, so that it is one run of the whole tape."""
        return self._read is None

    @property
    def num_read(self) -> int:
        return self.num_rows if self._read is None else self._read.num_read

    def fill(self, chunks: Chunks, rows: Sequence[int], num_rows: int) -> None:
        """Write the rows that are read of a call of `num_rows` rows whose inputs are written."""
        self._chunks, self.num_rows, self._read = chunks, num_rows, None
        if self.second is None or rows == self._ids[:num_rows]:
            return
        read = ReadRows(chunks, rows, with_observed=self._with_observed)
        if read.is_whole:
            return
        here, every, num, num_chunks = self.here, self._every, read.num_read, len(chunks.starts)
        self._read, rows_read = read, read.rows()
        self.rows[:num], self._unread[: read.num_unread] = rows_read, read.unread()
        here.row_begin[: num_chunks + 1] = read.begins
        here.start[:num_chunks] = np.add(chunks.starts, np.subtract(read.firsts, every.row_begin[:num_chunks]))
        here.positions[:num], here.token_ids[:num] = every.positions[rows_read], every.token_ids[rows_read]
        here.rope_rows[:num] = every.rope_rows[rows_read]
        if here.seen is not None:
            here.seen[:num] = every.seen[rows_read]
        here.fill_adapters(chunks, read.begins)

    def replace(self, num_rows: int) -> None:
        """Take the hidden states at the first places for those of a call of so many rows."""
        self._chunks, self.num_rows, self._read = Chunks([0], [[0] * num_rows], []), num_rows, None

    def run(self, tape: Tape, last: int, dims: list[int], num_threads: int) -> None:
        """Compute the records before `last` of the whole tape, or where not all rows are read what stands for them."""
        if self._read is None or self.second is None:
            tape.run(dims, num_threads) if last == len(tape.nodes) else tape.run_range(0, last, dims, num_threads)
            return
        num_read, num_chunks = self._read.num_read, dims[SEQS]
        tape.run_range(0, self.num_stored, [self.num_rows, num_chunks, 0], num_threads)
        self.second.run_range(0, self._num_checks, [self._read.num_unread, 0, 0], num_threads)
        if num_read:
            self.second.run_range(self._num_checks, len(self.second.nodes), [num_read, num_chunks, 0], num_threads)
        if last > self._num_forward and dims[LOGITS]:
            tape.run_range(self._num_forward, last, [0, 0, dims[LOGITS]], num_threads)

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        """Return where rows lie among those that are read. Raises ValueError for another row."""
        if self._read is not None:
            return self._read.places(rows)
        if rows and not 0 <= min(rows) <= max(rows) < self.num_rows:
            raise ValueError(f"rows {min(rows)} to {max(rows)} of a call with {self.num_rows} rows")
        return rows

    def stream(self, tape: Tape, value: Value, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return rows of a stream. Raises ValueError for a row that is not there."""
        if self._read is None or value.buffer in self._narrow_streams:
            rows = self.places(rows)
        else:
            self._read.check(rows)
        return tape.floats(value.buffer, len(self._ids))[rows, : value.width]

    def are_finite(self) -> list[bool]:
        """Return for each chunk of the last call whether its rows are finite: at the end, or where they were left."""
        read = self._read
        if read is None:
            if self._finite[: self.num_rows].all():
                return [True] * len(self._chunks.starts)
            read = ReadRows(self._chunks.all_read())
        num = read.num_unread
        unread = np.ones(num, np.bool_)
        for flags in self._flags if num else ():
            unread &= flags[:num].reshape(num, -1).all(axis=1)
        return read.all_of_chunks(self._finite[: read.num_read], unread)

    def close(self) -> None:
        if self.second is not None:
            self.second.close()


Check = tuple[Buffer, int, int, int, float]
"""A value that must be finite: where it lies, its first column, numbers from row to row, width, bound."""


class Cut(NamedTuple):
    """Where a forward pass is cut: the number of records before, copies of the fields of those behind, buffers that
    cross, `inner` ones that are made behind, and what is checked of a row that goes no further."""

    num_stored: int
    behind: list[tuple[Node, dict[str, Any]]]
    crossing: list[Buffer]
    inner: list[Buffer]
    checks: list[Check]

    @classmethod
    def of(cls, graph: Graph, nodes: Sequence[Node], hidden: Value) -> Cut | None:
        """Return None where nothing is written that outlives a step, or nothing is computed behind.

        Raises ValueError for a record behind the last write that is not known to compute its rows each by itself."""
        last = max((node.index for node in nodes if is_write(node)), default=None)
        if last is None:
            return None
        before, behind = nodes[: last + 1], nodes[last + 1 :]
        known = {buffer for node in before for buffer in buffers_of(node.fields)}
        if hidden.buffer in known:
            return None
        for node in behind:
            if not (node.op in BY_ROW or node.op == "attention" or (node.op in WRITERS and not is_write(node))):
                raise ValueError(f"{node.op} behind the last write: are its rows computed each by itself?")
        used = dict.fromkeys(buffer for node in behind for buffer in buffers_of(node.fields))
        crossing = [buffer for buffer in used if buffer in known or buffer not in graph.buffers]
        if any(buffer.dim != ROWS for buffer in crossing):
            raise ValueError("a value of other than a step's rows crosses the last write")
        inner = [buffer for buffer in used if buffer not in crossing]
        fields = [(node, dict(node.fields)) for node in behind]
        return cls(last + 1, fields, crossing, inner, checks_of(graph, nodes[last], crossing))


def is_write(node: Node) -> bool:
    return node.op in WRITERS and node.fields[WRITERS[node.op]] is not None


def checks_of(graph: Graph, write: Node, crossing: Sequence[Buffer]) -> list[Check]:
    """Return what a row wrote last, as the cache holds it, and the values of numbers that cross."""
    fields = write.fields
    names = ("heads", "kv_heads", "head_dim", "value_dim")
    heads, kv_heads, key_dim, value_dim = (fields.get(name, 0) for name in names)
    if write.op == "rope_store":
        source, ld, first = fields["x"], fields["ld_x"], heads * key_dim
        width = kv_heads * (key_dim + (0 if fields["v"] is None else value_dim))
        bound = BOUNDS.get(TYPE_NAMES[fields["kv_type"]], math.inf)
    else:
        source, ld, first, bound = fields["out"], fields["ld_out"], 0, math.inf
        width = fields["width"] if write.op == "conv" else heads * value_dim
    (buffer,) = buffers_of({"": source})
    column = source[2] if isinstance(source, tuple) else 0
    checks: list[Check] = [(buffer, column + first, ld, width, bound)]
    widths: dict[Buffer, int] = {}
    for value in graph.values:
        widths[value.buffer] = max(widths.get(value.buffer, 0), value.column + value.width)
    others = [other for other in crossing if other is not buffer and other in widths]
    return checks + [(other, 0, other.row_bytes // 4, widths[other], math.inf) for other in others]


def gathered(graph: Graph, ops: RankOps, flags: Ints) -> Ints:
    """Record a gather of one number for each row, and return those of all ranks [R, world]."""
    world = ops.plan.world
    every, spans = np.zeros((len(flags), world), np.int32), [(rank, 0, rank, 1) for rank in range(world)]
    fields = ops.gathers.fields(spans, world, 4 * world)
    fields |= {"x": flags, "ld_x": 1, "out": every, "ld_out": world} | NO_CODES | NO_TARGETS
    graph.put("gather", ROWS, None, fields)
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
    """Return a field's value with other buffers, or arrays in their place, and other arrays of the step."""
    if isinstance(value, Buffer):
        return moved.get(value, value)
    if isinstance(value, np.ndarray):
        return moved.get(id(value), value)
    if not isinstance(value, tuple):
        return value
    kind, what, rest = value
    if kind == "column":
        target = moved.get(what, what)
        return target.reshape(-1)[rest:] if isinstance(target, np.ndarray) else (kind, target, rest)
    return kind, what, [{name: with_moved(part, moved) for name, part in call.items()} for call in rest]
