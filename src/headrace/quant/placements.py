"""Logs after loading which kernels the matrices of a quantised checkpoint run on, and their cost in bytes.

Owns the counts and their wording. Called by `checkpoint.stacks`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from headrace.quant.base import MatrixSource
from headrace.quant.fit import Fit
from headrace.quant.schemes import Scheme, kernel_name

logger = logging.getLogger(__name__)

MIB = 2**20
SHOWN = 3
MOST_HELD = 1.05
"""Share of the bytes in the file, above which the log names the cost in memory."""


@dataclass(slots=True)
class _Placed:
    """Matrices of one kernel. stored: bytes in the checkpoint. held: bytes that the kernel reads."""

    names: list[str] = field(default_factory=list)
    stored: int = 0
    held: int = 0
    rounding: float = 0.0


def cost_of(stored: int, num_bytes: int) -> str:
    """How many times the bytes in the file the `num_bytes` in memory are, in words, where it is more than
    `MOST_HELD`."""
    return f", {num_bytes / stored:.2f} times as much" if num_bytes > MOST_HELD * stored else ""


class Placements:
    """`method`: quant_method of the checkpoint; `dtype`: of dequantised weights."""

    def __init__(self, method: str, dtype: str) -> None:
        self._method, self._dtype = method, dtype
        self._placed: dict[tuple[Scheme | None, str], _Placed] = {}

    def add(self, source: MatrixSource, fit: Fit, stored: int) -> None:
        placed = self._placed.setdefault((fit.scheme, fit.why), _Placed())
        placed.names.append(source.name)
        placed.stored += stored
        placed.held += round(source.scheme.bits_per_weight(source.num_in) * source.num_out * source.num_in / 8)
        placed.held += 0 if fit.columns is None else 2 * len(fit.columns) * (source.num_out + 2 * source.num_in)
        placed.held += 0 if fit.permutation is None else 4 * source.num_in
        placed.rounding = max(placed.rounding, fit.rounding)

    def lines(self) -> list[str]:
        """One sentence for each kernel, and for each reason to have none."""
        lines = []
        for (scheme, why), placed in self._placed.items():
            count = f"{len(placed.names)} {'matrix' if len(placed.names) == 1 else 'matrices'}"
            sizes = f"{placed.stored / MIB:.1f} MiB stored, {placed.held / MIB:.1f} MiB in memory"
            sizes += cost_of(placed.stored, placed.held)
            if scheme is None:
                listing = ", ".join(placed.names[:SHOWN]) + (", ..." if len(placed.names) > SHOWN else "")
                lines.append(f"{self._method}: {count} dequantised to {self._dtype}, for {why} ({sizes}): {listing}")
                continue
            remark = f" {why}" if why else ""
            text = f"{self._method}: {count} on the {kernel_name(scheme)} kernels{remark} ({sizes})"
            if placed.rounding:
                text += f"; rounding to float16 moves a weight by at most {placed.rounding:.2g} of a step"
            lines.append(text)
        return lines

    def log(self) -> None:
        for line in self.lines():
            logger.info("%s", line)
