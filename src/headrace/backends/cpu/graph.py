"""A model's forward pass as a graph: values, the buffers that hold them, and the nodes that fill the buffers.

`Graph` owns the order of nodes and, when it is finished, where every buffer lies: buffers whose lives do not overlap
share memory. Knows operators by name and sizes by row; must not know models, nor call the native library. Filled by
`ops.CpuOps`, read by `tape`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.backends.cpu.arena import Block, place

ROWS, SEQS, LOGITS, FREE = 0, 1, 2, 3
"""Dimensions that change from step to step, as csrc/include/kernels.h numbers them; experts count from FREE on."""

ALIGN = 64


@dataclass(slots=True, eq=False)
class Buffer:
    """`row_bytes` for each row of dimension `dim`. `first` and `last` are the nodes that first and last touch it."""

    row_bytes: int
    dim: int
    first: int
    last: int
    offset: int = -1


@dataclass(slots=True, eq=False)
class Quantised:
    """Rows as int8 codes with a scale and a sum of codes for each group of inputs."""

    q: Buffer
    scales: Buffer
    sums: Buffer
    group: int

    @property
    def ld_q(self) -> int:
        return self.q.row_bytes

    @property
    def ld_s(self) -> int:
        return self.scales.row_bytes // 4

    def buffers(self) -> tuple[Buffer, ...]:
        return self.q, self.scales, self.sums

    def fields(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "ld_q": self.ld_q,
            "scales": self.scales,
            "sums": self.sums,
            "ld_s": self.ld_s,
            "group": self.group,
        }


@dataclass(slots=True, eq=False)
class Node:
    """One operator call. Values of `fields` are ints, floats, None, numpy arrays (kept alive) or Buffers.

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
    """Rows of `width` float32 numbers in the first columns of `buffer`. Models may add two values, no more."""

    graph: Graph
    buffer: Buffer
    width: int
    node: Node | None = None
    num_uses: int = 0
    quantised: dict[int, Quantised] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return self.buffer.dim

    @property
    def ld(self) -> int:
        return self.buffer.row_bytes // 4

    def __add__(self, other: Value) -> Value:
        return self.graph.add(self, other)


class Graph:
    """Nodes in the order in which they run.

    `buffer`, `touch` and `read` keep the lives of buffers: every buffer of a node must pass through them before `put`.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.buffers: dict[Buffer, None] = {}

    def buffer(self, row_bytes: int, dim: int) -> Buffer:
        """Return a new buffer that the next node fills."""
        at = len(self.nodes)
        buffer = Buffer(-(-row_bytes // ALIGN) * ALIGN, dim, at, at)
        self.buffers[buffer] = None
        return buffer

    def value(self, width: int, dim: int) -> Value:
        """Return a new value that the next node fills."""
        return Value(self, self.buffer(4 * width, dim), width)

    def touch(self, buffer: Buffer) -> Buffer:
        """Return `buffer`, which the next node reads."""
        buffer.last = len(self.nodes)
        return buffer

    def read(self, value: Value) -> Buffer:
        """Return the floats of `value`, which the next node reads."""
        value.num_uses += 1
        return self.touch(value.buffer)

    def put(self, op: str, dim: int, out: Value | None, fields: dict[str, Any], **facts: Any) -> Node:
        node = Node(op, dim, fields, len(self.nodes), **facts)
        if out is not None:
            out.node = node
        self.nodes.append(node)
        return node

    def add(self, x: Value, y: Value) -> Value:
        """Return x + y. If y is unread and the last node, a linear layer, made it, that node adds x as its residual."""
        if y.node is not None and y.node is self.nodes[-1] and y.num_uses == 0 and not y.quantised:
            node = y.node
            if node.op.startswith("linear") and node.fields["residual"] is None and x.buffer is not y.buffer:
                x.num_uses += 1
                x.buffer.last = max(x.buffer.last, len(self.nodes) - 1)
                node.fields |= {"residual": x.buffer, "ld_res": x.ld}
                return y
        out = self.value(x.width, x.dim)
        fields = {"x": self.read(x), "ld_x": x.ld, "y": self.read(y), "ld_y": y.ld, "width": x.width}
        self.put("add", x.dim, out, fields | {"out": out.buffer, "ld_out": out.ld})
        return out

    def quantised(self, x: Value, group: int) -> Quantised:
        """Return the codes of `x` in groups: written by the node that makes x if it can, else by a node `quantize`."""
        codes = x.quantised.get(group)
        if codes is None:
            ld_q = -(-x.width // 64) * 64 + 64  # never a power of two: rows that alias in the cache halve the speed
            ld_s = -(-x.width // group)
            parts = [self.buffer(size, x.dim) for size in (ld_q, 4 * ld_s, 4 * ld_s)]
            codes = Quantised(parts[0], parts[1], parts[2], group)
            x.quantised[group] = codes
            node = x.node
            if node is not None and "q" in node.fields and node.fields["q"] is None:
                for part in parts:
                    part.first = node.index
                node.fields |= codes.fields()
            else:
                fields = {"x": self.read(x), "ld_x": x.ld, "width": x.width} | codes.fields()
                self.put("quantize", x.dim, None, fields)
        for part in codes.buffers():
            self.touch(part)
        return codes

    def drop(self, buffer: Buffer) -> None:
        """Leave `buffer` out of the arena: nothing is kept in it, or it lies elsewhere."""
        del self.buffers[buffer]
        buffer.offset = 0

    def drop_unread(self, values: list[Value]) -> None:
        """Drop the floats of values of which only the codes are read."""
        for value in values:
            if value.quantised and value.num_uses == 0 and value.node is not None:
                value.node.fields["out"] = None
                self.drop(value.buffer)

    def plan(self, most: dict[int, int]) -> int:
        """Give every buffer a place in one arena and return its bytes; `most` holds each dimension's largest size."""
        blocks = [Block(b.row_bytes * most.get(b.dim, most[ROWS]), b.first, b.last) for b in self.buffers]
        offsets, total = place(blocks)
        for buffer, offset in zip(self.buffers, offsets, strict=True):
            buffer.offset = offset
        return total
