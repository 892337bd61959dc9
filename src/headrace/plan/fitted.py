"""How long a step takes on this machine, fitted to steps that it ran: straight lines between numbers of rows, one for
rows of logits, and one for the positions that rows look back on. Kept in the cache folder, by model and form.

Called by `headrace plan --check`, which measures, and by `headrace plan` and `headrace simulate`, which use it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError, HeadraceError

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of rows at which the time of a row may change: kernels take rows in groups."""
MIN_SAMPLES = 40
FOLDER = Path("~/.cache/headrace/steps")


class Sample(NamedTuple):
    """A step that ran: its rows, rows of logits, positions that its rows saw, and seconds."""

    num_rows: int
    num_logits: int
    num_seen: float
    seconds: float


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: base, and for each of `knots` a slope from there on, for each row of logits, and for each
    position seen. `median_error`, `p90_error`: of steps that were not fitted, as parts of their seconds."""

    base: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]
    logits: float
    seen: float
    num_steps: int = 0
    most_rows: int = 0
    median_error: float = 0.0
    p90_error: float = 0.0

    def of(self, num_rows: int, num_logits: int, num_seen: float) -> float:
        rows = sum(
            slope * (num_rows - knot) for slope, knot in zip(self.slopes, self.knots, strict=True) if num_rows > knot
        )
        return max(1e-9, self.base + rows + self.logits * num_logits + self.seen * num_seen)

    def __call__(self, starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
        return self.of(sum(lens), num_logits, num_seen(starts, lens))


def num_seen(starts: Sequence[int], lens: Sequence[int]) -> float:
    """Return the positions that the rows of these chunks look back on, in all."""
    return sum(n * (s + n / 2) for s, n in zip(starts, lens, strict=True))


def fit(samples: Sequence[Sample]) -> StepModel:
    """Return the model with the least squares of relative errors. The errors are those of the odd steps after a fit of
    the even ones; the model is fitted to all.

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
    errors = sorted(abs(half.of(*each[:3]) / each.seconds - 1) for each in samples[1::2])
    return msgspec.structs.replace(
        _solve(samples, knots),
        num_steps=len(samples),
        most_rows=rows[-1],
        median_error=errors[len(errors) // 2],
        p90_error=errors[len(errors) * 9 // 10],
    )


def _solve(samples: Sequence[Sample], knots: tuple[int, ...]) -> StepModel:
    table = np.array([sample[:3] for sample in samples], np.float64)
    weights = 1 / np.array([sample.seconds for sample in samples], np.float64)
    hinges = np.maximum(0, table[:, :1] - np.array(knots))
    columns = np.concatenate([np.ones((len(table), 1)), hinges, table[:, 1:]], axis=1) * weights[:, None]
    scales = np.abs(columns).max(axis=0)
    scales[scales == 0] = 1.0
    solution: NDArray[np.float64] = np.linalg.lstsq(columns / scales, np.ones(len(table)), rcond=1e-9)[0] / scales
    base, *slopes, logits, seen = (float(number) for number in solution)
    return StepModel(base=base, knots=knots, slopes=tuple(slopes), logits=logits, seen=seen)


def path_of(name: str, form: str, kv_dtype: str) -> Path:
    """Return where the model of a model `name` in these forms on this kind of machine is kept."""
    if Path(name).expanduser().exists():
        name = str(Path(name).expanduser().resolve())
    key = "\n".join((name, form, kv_dtype, platform.machine(), platform.processor(), platform.node()))
    return FOLDER.expanduser() / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"


def save(path: Path, model: StepModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(model))


def load(path: Path) -> StepModel | None:
    """Return the model of a file; None if there is none. Raises `CheckpointError` for one that can not be read."""
    if not path.is_file():
        return None
    try:
        model = msgspec.json.decode(path.read_bytes(), type=StepModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}; headrace plan --check writes it anew") from None
    if len(model.knots) != len(model.slopes):
        raise CheckpointError(f"{path}: knots and slopes differ in number; headrace plan --check writes it anew")
    return model
