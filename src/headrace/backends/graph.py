"""A model's forward pass as a graph: values, the buffers that hold them, and the nodes that fill the buffers.

`Graph` owns the order of nodes and, when it is finished, where every buffer lies: buffers whose lives do not overlap
share memory. Two additions become part of a neighbouring node: a residual, and the codes of a value. Knows operators by
their fields, and sizes by row; must not know models, arrays or devices. Filled by a backend's `Ops`, read by its tape.

Fields with a meaning here: `residual` and `ld_res` (an operator that can add a residual has them, None and 0 until it
does), `q` (an operator that can write codes has it, None until it does), `out` (None where only the codes are read).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from headrace.backends.arena import Block, place

ROWS, SEQS, LOGITS, PAIRS, OWN_PAIRS = 0, 1, 2, 3, 4
"""Dimensions that change from step to step, as csrc/include/kernels.h numbers them. PAIRS counts pairs of a row and one
of its experts, OWN_PAIRS the pairs of one rank's experts: operators write both numbers during the step."""

ALIGN = 64
ALIASED = 4096


@dataclass(slots=True, eq=False)
class Buffer:
    """`row_bytes` for each row of dimension `dim`. `first` and `last` are the nodes that first and last touch it."""

    row_bytes: int
    dim: int
    first: int
    last: int
    offset: int = -1


class Codes(Protocol):
    """The rows of a value once more, as codes with scales, in a form of the backend's own."""

    def buffers(self) -> Iterable[Buffer]: ...

    def fields(self) -> dict[str, Any]:
        """Return the fields of a node that writes or reads the codes; one of them is `q`."""
        ...


AnyCodes = TypeVar("AnyCodes", bound=Codes)


@dataclass(slots=True, eq=False)
class Node:
    """One operator call. Values of `fields` are ints, floats, None, arrays of the backend (kept alive), Buffers, or
    tuples that the backend's tape resolves.

    `read_bytes`: of weights, which every call reads once. `row_ops`: multiplications and additions for each row.
    """

    op: str
    dim: int
    fields: dict[str, Any]
    index: int
    note: str = ""
    read_bytes: int = 0
    row_ops: int = 0


@dataclass(slots=True, eq=False)
class Value:
    """Rows of `width` floats of `item_bytes` bytes in the columns of `buffer` from `column` on. Models may add two
    values, no more. `codes` are its codes in each form in which a node reads them. `tail`: the last node that has added
    to what `node` made, in place, and takes its residual too."""

    graph: Graph
    buffer: Buffer
    width: int
    item_bytes: int
    node: Node | None = None
    num_uses: int = 0
    codes: dict[Hashable, Any] = field(default_factory=dict)
    column: int = 0
    tail: Node | None = None

    @property
    def at(self) -> Any:
        """Where its first number lies, as a node's field."""
        return ("column", self.buffer, self.column) if self.column else self.buffer

    @property
    def dim(self) -> int:
        return self.buffer.dim

    @property
    def ld(self) -> int:
        """Items from one row to the next."""
        return self.buffer.row_bytes // self.item_bytes

    def __add__(self, other: Value) -> Value:
        return self.graph.add(self, other)


class Graph:
    """Nodes in the order in which they run. A number of a value has `item_bytes` bytes unless the value says otherwise.

    apart: rows of values are set apart where their stride is a multiple of a page, for they would drive each other out
    of a processor's caches.

    `buffer`, `touch` and `read` keep the lives of buffers: every buffer of a node must pass through them before `put`.
    """

    def __init__(self, item_bytes: int, apart: bool = False) -> None:
        self.item_bytes, self.apart = item_bytes, apart
        self.nodes: list[Node] = []
        self.buffers: dict[Buffer, None] = {}
        self.values: list[Value] = []
        self.pairs_of_row = 1
        """The most experts that a row has in a layer."""

    def buffer(self, row_bytes: int, dim: int) -> Buffer:
        """Return a new buffer that the next node fills."""
        at = len(self.nodes)
        buffer = Buffer(-(-row_bytes // ALIGN) * ALIGN, dim, at, at)
        self.buffers[buffer] = None
        return buffer

    def value(self, width: int, dim: int, item_bytes: int = 0) -> Value:
        """Return a new value that the next node fills. `item_bytes` 0: as many as the graph's."""
        item_bytes = item_bytes or self.item_bytes
        row_bytes = item_bytes * width
        if self.apart and row_bytes % ALIASED == 0:
            row_bytes += 3 * ALIGN
        value = Value(self, self.buffer(row_bytes, dim), width, item_bytes)
        self.values.append(value)
        return value

    def outside(self, width: int, dim: int, row_bytes: int = 0) -> Value:
        """Return a value that lies outside the arena and that no node fills (see `keep_outside`). `row_bytes` 0: as
        many as a new buffer's."""
        row_bytes = row_bytes or -(-self.item_bytes * width // ALIGN) * ALIGN
        return Value(self, Buffer(row_bytes, dim, 0, 0), width, self.item_bytes)

    def touch(self, buffer: Buffer) -> Buffer:
        """Return `buffer`, which the next node reads."""
        buffer.last = len(self.nodes)
        return buffer

    def read(self, value: Value) -> Any:
        """Return the field of a node for the floats of `value`, which the next node reads."""
        value.num_uses += 1
        self.touch(value.buffer)
        return value.at

    def columns(self, value: Value, first: int, width: int) -> Value:
        """Return columns first ... first + width - 1 of `value`, where they lie."""
        value.num_uses += 1
        return Value(self, value.buffer, width, value.item_bytes, column=value.column + first)

    def put(self, op: str, dim: int, out: Value | None, fields: dict[str, Any], **facts: Any) -> Node:
        """Append a node. `out` is the value that it makes."""
        node = Node(op, dim, fields, len(self.nodes), **facts)
        if out is not None:
            out.node = node
        self.nodes.append(node)
        return node

    def add(self, x: Value, y: Value) -> Value:
        """Return x + y. If the last node made y, nothing has read y, and the node can add a residual, it adds x."""
        node, is_apart = y.node, x.buffer is not y.buffer and x.item_bytes == y.item_bytes
        if node is not None and is_apart and self._adds_residual(y, node):
            x.num_uses += 1
            x.buffer.last = max(x.buffer.last, len(self.nodes) - 1)
            for each in (node, y.tail or node):
                each.fields |= {"residual": x.at, "ld_res": x.ld}
            return y
        out = self.value(x.width, x.dim, max(x.item_bytes, y.item_bytes))
        fields = {"x": self.read(x), "ld_x": x.ld, "y": self.read(y), "ld_y": y.ld, "width": x.width}
        self.put("add", x.dim, out, fields | {"out": out.buffer, "ld_out": out.ld})
        return out

    def _adds_residual(self, y: Value, node: Node) -> bool:
        if (y.tail or node) is not self.nodes[-1] or y.num_uses or y.codes:
            return False
        return "residual" in node.fields and node.fields["residual"] is None

    def codes(self, x: Value, form: Hashable, make: Callable[[], AnyCodes]) -> AnyCodes:
        """Return the codes of `x` in a form: written by the node that makes x if it can, else by a node `quantize`.

        `make` makes the buffers of codes that do not exist yet.
        """
        codes: AnyCodes | None = x.codes.get(form)
        if codes is None:
            codes = x.codes[form] = make()
            node = x.node
            if node is not None and "q" in node.fields and node.fields["q"] is None:
                for buffer in codes.buffers():
                    buffer.first = node.index
                node.fields |= codes.fields()
            else:
                fields = {"x": self.read(x), "ld_x": x.ld, "width": x.width} | codes.fields()
                self.put("quantize", x.dim, None, fields)
        for buffer in codes.buffers():
            self.touch(buffer)
        return codes

    def drop(self, buffer: Buffer) -> None:
        """Leave `buffer` out of the arena: it is unused, or it lies elsewhere."""
        self.buffers.pop(buffer, None)
        buffer.offset = 0

    def drop_unread(self) -> None:
        """Drop the floats of values of which only the codes are read."""
        for value in self.values:
            if value.codes and value.num_uses == 0 and value.node is not None:
                value.node.fields["out"] = None
                self.drop(value.buffer)

    def keep_outside(self, buffer: Buffer, array: Any) -> None:
        """Keep `buffer` in `array`, outside the arena: fields of all nodes so far then hold the array."""
        self.drop(buffer)
        for node in self.nodes:
            for name, value in node.fields.items():
                if value is buffer:
                    node.fields[name] = array
                elif isinstance(value, tuple) and value[:2] == ("column", buffer):
                    node.fields[name] = array.reshape(-1)[value[2] :]

    def plan(self, most: dict[int, int]) -> int:
        """Give every buffer a place in one arena and return its bytes; `most` holds each dimension's largest size."""
        most = most | dict.fromkeys((PAIRS, OWN_PAIRS), most[ROWS] * self.pairs_of_row)
        blocks = [Block(b.row_bytes * most[b.dim], b.first, b.last) for b in self.buffers]
        offsets, total = place(blocks)
        for buffer, offset in zip(self.buffers, offsets, strict=True):
            buffer.offset = offset
        return total
