"""`narrow` cuts a recorded forward pass behind its last write to memory that outlives the step.

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

from headrace.backends.cpu.cache import TYPE_CODES
from headrace.backends.cpu.gathers import NO_CODES, NO_TARGETS
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.graph import READ, ROWS, UNREAD, Buffer, Node, Value
from headrace.backends.reads import ReadRows
from headrace.backends.step import StepRows

Ints = NDArray[np.int32]

WRITERS = {"rope_store": "k", "conv": "state", "delta": "state", "scan": "state"}
"""Operators that write memory that outlives a step, and the field that has it: None where one writes nothing there."""
BY_ROW = frozenset(
    "embedding select_rows rms_norm layer_norm add softcap quantize activation xielu gated multiply scale softplus "
    "permute spread linear_i4 linear_i5 linear_i6 linear_i8 linear_k linear_w linear_f linear_each route moe_group "
    "moe_gather moe_combine gather".split()
)
"""Operators whose rows are computed each by itself. Of the others, `attention` takes any rows that follow each other."""

BOUNDS = {"float16": 65520.0, "fp8_e5m2": 61440.0, "bfloat16": math.ldexp(511, 119), "int4": math.ldexp(1, 126)}
"""From here on a cache of the type holds infinity; int4 has its numbers' span in bfloat16. The others scale numbers."""


class Narrowed:
    """The rows that are read, as the records behind the cut find them, and what the records before it found.

    hidden: the hidden states of the rows that are read, by their places. num_stored: the number of records that a step
    without them needs.
    """

    def __init__(self, inputs: StepRows) -> None:
        most, num_chunks = inputs.max_rows, len(inputs.start)
        self.rows, self.unread = np.arange(most, dtype=np.int32), np.zeros(most, np.int32)
        self.inputs = replace(
            inputs, token_ids=np.zeros(most, np.int32), positions=np.zeros(most, np.int32),
            row_begin=np.zeros(num_chunks + 1, np.int32), start=np.zeros(num_chunks, np.int32),
        )  # fmt: skip
        self.hidden: Value
        self.num_stored = 0
        self.flags: list[Ints] = []
        self._every, self._is_whole = inputs, True

    def fill(self, starts: Sequence[int], read: ReadRows) -> None:
        """Write the rows that are read, of a step whose inputs are written."""
        here, every, num, num_chunks = self.inputs, self._every, read.num_read, len(starts)
        here.row_begin[: num_chunks + 1] = read.begins
        if read.is_whole:
            if not self._is_whole:
                self.rows[:] = np.arange(len(self.rows), dtype=np.int32)
            here.start[:num_chunks] = starts
            here.positions[:num], here.token_ids[:num] = every.positions[:num], every.token_ids[:num]
        else:
            rows, unread = read.rows(), read.unread()
            self.rows[:num], self.unread[: len(unread)] = rows, unread
            here.start[:num_chunks] = np.add(starts, np.subtract(read.firsts, every.row_begin[:num_chunks]))
            here.positions[:num], here.token_ids[:num] = every.positions[rows], every.token_ids[rows]
        self._is_whole = read.is_whole

    def sound(self, num_unread: int) -> NDArray[np.bool_]:
        """Return whether each unread row of the last run is sound."""
        parts = [flags[:num_unread].reshape(num_unread, -1).all(axis=1) for flags in self.flags]
        sound: NDArray[np.bool_] = np.logical_and.reduce(parts)
        return sound


def narrow(ops: CpuOps | RankOps, hidden: Value, inputs: StepRows) -> Narrowed | None:
    """Cut the graph of `ops`, whose last value is `hidden`. Return None where nothing is written that outlives a step.

    Raises ValueError for a record behind the last write that is not known to compute its rows each by itself.
    """
    graph = ops.graph
    nodes = list(graph.nodes)
    last = max((node.index for node in nodes if is_write(node)), default=None)
    if last is None:
        return None
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
    result, lives = Narrowed(inputs), {buffer: buffer.last for buffer in crossing}
    del graph.nodes[last + 1 :]
    check(ops, nodes[last], crossing, result)
    result.num_stored = len(graph.nodes)
    moved: dict[Any, Any] = {}
    for buffer in crossing:
        width, copy = buffer.row_bytes // 4, Buffer(buffer.row_bytes, READ, len(graph.nodes), lives[buffer])
        fields = {"rows": result.rows, "x": graph.touch(buffer), "ld_x": width, "width": width}
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
    moved |= {id(getattr(inputs, name)): getattr(result.inputs, name) for name in by_row}
    for node in behind:
        node.index += shift
        node.dim = READ if node.dim == ROWS else node.dim
        node.fields = {name: with_moved(value, moved) for name, value in node.fields.items()}
        graph.nodes.append(node)
    result.hidden = hidden
    if hidden.buffer in moved:
        result.hidden = replace(hidden, buffer=moved[hidden.buffer], node=None, codes={})
    return result


def is_write(node: Node) -> bool:
    return node.op in WRITERS and node.fields[WRITERS[node.op]] is not None


def check(ops: CpuOps | RankOps, write: Node, crossing: Sequence[Buffer], result: Narrowed) -> None:
    """Record whether what each unread row wrote last, as the cache holds it, and the values that cross are finite."""
    graph, fields = ops.graph, write.fields
    wrote = {name: fields.get(name) for name in ("heads", "kv_heads", "head_dim", "value_dim")}
    if write.op == "rope_store":
        given, ld, first = fields["x"], fields["ld_x"], wrote["heads"] * wrote["head_dim"]
        values = 0 if fields["v"] is None else wrote["value_dim"]
        width = wrote["kv_heads"] * (wrote["head_dim"] + values)
        names = {code: name for name, code in TYPE_CODES.items()}
        bound = BOUNDS.get(names[fields["kv_type"]], math.inf)
    else:
        given, ld, first, bound = fields["out"], fields["ld_out"], 0, math.inf
        width = fields["width"] if write.op == "conv" else wrote["heads"] * wrote["value_dim"]
    (buffer,) = buffers_of({"": given})
    column = given[2] if isinstance(given, tuple) else 0
    put_check(ops, result, ("column", buffer, column + first), ld, width, bound)
    if isinstance(ops, RankOps):
        # Each rank wrote some heads alone, and all of them must judge alike.
        result.flags[-1] = gathered(ops, result.flags[-1])
    widths: dict[Buffer, int] = {}
    for value in graph.values:
        widths[value.buffer] = max(widths.get(value.buffer, 0), value.column + value.width)
    for other in crossing:
        if other is not buffer and other in widths:
            put_check(ops, result, other, other.row_bytes // 4, widths[other], math.inf)


def put_check(ops: CpuOps | RankOps, result: Narrowed, x: Any, ld: int, width: int, bound: float) -> None:
    flags = np.zeros(len(result.rows), np.int32)
    for buffer in buffers_of({"": x}):
        ops.graph.touch(buffer)
    fields = {"rows": result.unread, "x": x, "ld_x": ld, "width": width, "bound": bound, "finite": flags}
    ops.graph.put("finite", UNREAD, None, fields)
    result.flags.append(flags)


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
