"""Records that put a value together out of the parts on each rank: columns as floats or codes, or whole rows.

A gather moves numbers and computes none, so no bit depends on the number of ranks (ADR 0037, 0040). Knows values and
layouts; must not know models or processes. Called by `ranks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.codes import new_codes, padded, quantised
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.graph import PAIRS, Value
from headrace.backends.shares import Layout, Seat
from headrace.protocol.errors import CheckpointError

NO_CODES: dict[str, Any] = {"q": None, "ld_q": 0, "scales": None, "sums": None, "ld_s": 0, "group": 1}
NO_TARGETS: dict[str, Any] = {"to_q": None, "ld_to_q": 0, "to_scales": None, "to_sums": None, "ld_to_s": 0}


class Gathers:
    """The gathers of the rank at `seat`, recorded where `ops` records. Raises `CheckpointError` for rows that do not
    fit the ranks' memory."""

    def __init__(self, ops: CpuOps, seat: Seat) -> None:
        self._ops, self._seat = ops, seat

    def columns(self, x: Value, layout: Layout) -> Value:
        """Return the whole rows of which each rank has the columns that `layout` gives it."""
        fields = self.fields(self._spans(layout), layout.width, 4 * layout.width)
        return self._floats(x, layout.width, x.dim, fields)

    def rows(self, x: Value, first: NDArray[np.int32]) -> Value:
        """Return all pairs, of which each rank has some whole rows: this rank's are x, numbered from first[0] on."""
        fields = self.fields([(self._seat.plan.rank, 0, 0, x.width)], x.width, 4 * x.width) | {"from": first}
        return self._floats(x, x.width, PAIRS, fields)

    def codes(self, x: Value, layout: Layout, group: int) -> Value:
        """As `columns`, for the codes of x alone. The ranks' columns begin at multiples of `group`."""
        graph, width = self._ops.graph, layout.width
        source = quantised(x, group)
        whole = graph.outside(width, x.dim)
        num_groups = -(-width // group)
        target = whole.codes[group] = new_codes(graph, x.dim, padded(width), num_groups, group)
        fields = self.fields(self._spans(layout), width, width + 8 * num_groups) | source.fields()
        fields |= {"x": None, "ld_x": 0, "out": None, "ld_out": 0}
        fields |= {"to_q": target.q, "ld_to_q": target.ld_q}
        fields |= {"to_scales": target.scales, "to_sums": target.sums, "ld_to_s": target.ld_s}
        for buffer in (*source.buffers(), *target.buffers()):
            graph.touch(buffer)
        graph.put("gather", x.dim, None, fields)
        return whole

    def _floats(self, x: Value, width: int, dim: int, fields: dict[str, Any]) -> Value:
        graph = self._ops.graph
        out = graph.value(width, dim)
        fields |= {"x": graph.read(x), "ld_x": x.ld, "out": out.buffer, "ld_out": out.ld}
        graph.put("gather", dim, out, fields | NO_CODES | NO_TARGETS)
        out.node = None  # it can neither add a residual nor quantise
        return out

    def _spans(self, layout: Layout) -> list[tuple[int, int, int, int]]:
        return [(rank, *span) for rank in range(self._seat.plan.world) for span in layout.spans(rank)]

    def fields(self, spans: list[tuple[int, int, int, int]], width: int, row_bytes: int) -> dict[str, Any]:
        if row_bytes > self._seat.most_row_bytes:
            raise CheckpointError(
                f"rows of {width} numbers: the memory that ranks share has room for "
                f"{self._seat.most_row_bytes} bytes of one"
            )
        rows = np.array(spans, np.int64).reshape(-1, 4)
        return {"ranks": self._seat.group, "from": None, "spans": rows, "count": len(rows), "width": width}
