"""A graph on the native tape: addresses resolved, one native call a step, and tools to inspect it.

`Tape` owns the arena of intermediate buffers and keeps every array alive whose address it recorded. Knows nodes and
buffers; must not know requests. Made by `program`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.backends.cpu.memory import aligned
from headrace.backends.graph import LOGITS, OWN_PAIRS, PAIRS, ROWS, SEQS, Buffer, Graph, Node
from headrace.backends.native import pack, record, require_native

DIM_NAMES = {ROWS: "rows", SEQS: "seqs", LOGITS: "logits", PAIRS: "pairs", OWN_PAIRS: "own pairs"}


@dataclass(frozen=True, slots=True)
class OpTime:
    """Time of one record: `seconds` (median), bytes of weights that it read, and operations."""

    index: int
    op: str
    note: str
    seconds: float
    read_bytes: int
    num_ops: int

    @property
    def gb_per_s(self) -> float:
        return self.read_bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def tops(self) -> float:
        return self.num_ops / self.seconds / 1e12 if self.seconds else 0.0


class Tape:
    """The nodes of `graph`, recorded. `most` is the largest size of each dimension that changes."""

    def __init__(self, graph: Graph, most: dict[int, int], isa: str = "") -> None:
        self.graph, self.most = graph, most
        self.nodes = graph.nodes
        self.arena = aligned(max(64, graph.plan(most)))
        self._native = require_native().Tape(isa)
        self._tables: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        for node in graph.nodes:
            record(self._native, node.op, dim=node.dim, **self._resolved(node))

    def run(self, dims: list[int], num_threads: int = 0) -> None:
        """Run one step: dims are [rows, seqs, logits]. The GIL is released."""
        self._native.run(dims, num_threads)

    def run_range(self, first: int, last: int, dims: list[int], num_threads: int = 0) -> None:
        """Run records first ... last - 1 only."""
        self._native.run_range(first, last, dims, num_threads)

    def close(self) -> None:
        """Free the arena."""
        self._native = require_native().Tape("")
        self.arena = aligned(64)

    def dump(self) -> list[str]:
        """Return a line for each record: number, operator, dimension, widths, weights."""
        lines = []
        for i, node in enumerate(self.nodes):
            sizes = " ".join(
                f"{name}={value}"
                for name, value in node.fields.items()
                if isinstance(value, int | float) and not name.startswith("ld_") and value
            )
            weights = f"  {node.read_bytes / 1e6:.2f} MB of {node.note}" if node.read_bytes else ""
            fused = "+quantize" if node.fields.get("q") is not None and not node.op.startswith(("linear", "q")) else ""
            fused += "+residual" if node.fields.get("residual") is not None else ""
            lines.append(f"{i:4d} {node.op}{fused:<10} [{DIM_NAMES[node.dim]}] {sizes}{weights}")
        return lines

    def profile(self, dims: list[int], repeats: int = 5, num_threads: int = 0) -> list[OpTime]:
        """Return the times of all records at these sizes, medians over `repeats` runs, with the inputs as they are."""
        runs = np.array([self._native.profile(dims, num_threads) for _ in range(repeats)])
        seconds = np.median(runs, axis=0) * 1e-9
        dims, times = self.sizes(dims), []
        for i, (node, time) in enumerate(zip(self.nodes, seconds, strict=True)):
            ops = node.row_ops * dims[node.dim]
            times.append(OpTime(i, node.op, node.note, float(time), node.read_bytes, ops))
        return times

    def sizes(self, dims: list[int]) -> list[int]:
        """Return the size of every dimension: `dims`, and the sizes that operators wrote in the last run."""
        written = [int(size) for size in self._native.dims()[len(dims) :]]
        return dims + (written or [0])

    def address(self, buffer: Buffer) -> int:
        return int(self.arena.ctypes.data) + buffer.offset

    def floats(self, buffer: Buffer, num_rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the first rows of a buffer as float32, a view."""
        raw = self.arena[buffer.offset : buffer.offset + buffer.row_bytes * num_rows]
        return raw.view(np.float32).reshape(num_rows, buffer.row_bytes // 4)

    def _resolved(self, node: Node) -> dict[str, Any]:
        return {name: self.resolve(value) for name, value in node.fields.items()}

    def resolve(self, value: Any) -> Any:
        """Return a field's value as the record holds it: arrays and buffers by their address."""
        if value is None:
            return 0
        if isinstance(value, Buffer):
            return self.address(value)
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise ValueError("an array on the tape must be contiguous")
            return value.ctypes.data
        if isinstance(value, tuple):
            if value[0] == "column":
                return self.address(value[1]) + 4 * value[2]
            _, op, calls = value  # ("table", name of the operator, the fields of each call)
            parts = [pack(op, dim=0, **{name: self.resolve(part) for name, part in call.items()}) for call in calls]
            self._tables.append(np.frombuffer(b"".join(parts), np.uint8))
            return self._tables[-1].ctypes.data
        return value
