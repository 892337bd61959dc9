"""Fits the seconds of a step on this machine to steps that it ran: straight lines between numbers of rows, one for rows
of logits, one for the positions that rows look back on, and one for the positions that a row sees alone.

Called by `headrace plan --check`, which measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import HeadraceError
from headrace.protocol.step_model import StepModel

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of rows at which the time of a row may change: kernels take rows in groups."""
MIN_SAMPLES = 40


class Sample(NamedTuple):
    """A step that ran: its rows, rows of logits, positions that its rows saw, seconds, and the number of positions seen
    by rows that were alone in their chunk."""

    num_rows: int
    num_logits: int
    num_seen: float
    seconds: float
    num_alone: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, float, float]:
        """Return the arguments of `StepModel.of`."""
        return self.num_rows, self.num_logits, self.num_seen, self.num_alone


def fit(samples: Sequence[Sample]) -> StepModel:
    """Return the model with the least squares of relative errors. The errors are measured on the odd steps after a fit
    of the even ones; the model is fitted to all.

    Raises `HeadraceError` for fewer than `MIN_SAMPLES` steps."""
    if len(samples) < MIN_SAMPLES:
        raise HeadraceError(
            f"{len(samples)} steps were measured, and {MIN_SAMPLES} at least are needed to fit their times"
        )
    rows = sorted(sample.num_rows for sample in samples)
    # A slope needs steps beyond its knot.
    most = rows[-max(2, len(rows) // 50)]
    knots = tuple(knot for knot in KNOTS if knot < most) or (KNOTS[0],)
    half = _solve(samples[::2], knots)
    errors = sorted(abs(half.of(*each.sizes) / each.seconds - 1) for each in samples[1::2])
    return msgspec.structs.replace(
        _solve(samples, knots),
        num_steps=len(samples),
        most_rows=rows[-1],
        median_error=errors[len(errors) // 2],
        p90_error=errors[len(errors) * 9 // 10],
    )


def _solve(samples: Sequence[Sample], knots: tuple[int, ...]) -> StepModel:
    table = np.array([sample.sizes for sample in samples], np.float64)
    weights = 1 / np.array([sample.seconds for sample in samples], np.float64)
    hinges = np.maximum(0, table[:, :1] - np.array(knots))
    columns = np.concatenate([np.ones((len(table), 1)), hinges, table[:, 1:]], axis=1) * weights[:, None]
    scales = np.abs(columns).max(axis=0)
    scales[scales == 0] = 1.0
    solution: NDArray[np.float64] = np.linalg.lstsq(columns / scales, np.ones(len(table)), rcond=1e-9)[0] / scales
    base, *slopes, logits, seen, alone = (float(number) for number in solution)
    return StepModel(base=base, knots=knots, slopes=tuple(slopes), logits=logits, seen=seen, alone=alone)
