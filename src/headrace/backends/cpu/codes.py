"""The codes of a value as the kernels read them: int8 in groups of inputs, with the sums of codes for the weights'
minima. Knows buffers; must not know models. Called by `ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.backends.graph import Buffer, Graph, Value


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


def quantised(x: Value, group: int) -> Quantised:
    """Return the codes of `x` in groups."""

    def make() -> Quantised:
        ld_s = -(-x.width // group)
        return new_codes(x.graph, x.dim, padded(x.width), ld_s, group)

    return x.graph.codes(x, group, make)


def padded(width: int) -> int:
    """Return the bytes of a row of codes: never a power of two, since rows that alias in the cache halve the speed."""
    return -(-width // 64) * 64 + 64


def new_codes(graph: Graph, dim: int, ld_q: int, ld_s: int, group: int) -> Quantised:
    """Return codes that the next node writes."""
    q, scales, sums = (graph.buffer(size, dim) for size in (ld_q, 4 * ld_s, 4 * ld_s))
    return Quantised(q, scales, sums, group)
