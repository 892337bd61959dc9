"""How long a step takes, as `headrace plan --check` measured it: a fitted model, and the files in the cache folder that
keep one for each model and form. Must not import numpy: the server's process reads it, and splits steps by it.

Written by `headrace plan --check`; read by `plan.planner`, `headrace simulate` and `insight.time_split`.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.protocol.errors import CheckpointError
from headrace.protocol.step import EngineInfo

FOLDER = Path("~/.cache/headrace/steps")


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: base, and for each of `knots` a slope from there on, for each row of logits, for each position
    seen, and more for each that a row sees alone: rows of one chunk share the reading of the positions that they see.

    `median_error`, `p90_error`: of steps that were not fitted, as parts of their seconds."""

    base: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]
    logits: float
    seen: float
    alone: float = 0.0
    num_steps: int = 0
    most_rows: int = 0
    median_error: float = 0.0
    p90_error: float = 0.0

    def of(self, num_rows: int, num_logits: int, num_seen: float, num_alone: float = 0.0) -> float:
        """Return the seconds of a step, above 0. num_alone: of `num_seen`, those that rows alone in a chunk see."""
        rows = sum(
            slope * (num_rows - knot) for slope, knot in zip(self.slopes, self.knots, strict=True) if num_rows > knot
        )
        looks = self.seen * num_seen + self.alone * num_alone
        return max(1e-9, self.base + rows + self.logits * num_logits + looks)

    def __call__(self, starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
        return self.of(sum(lens), num_logits, num_seen(starts, lens), num_alone(starts, lens))


def num_seen(starts: Sequence[int], lens: Sequence[int]) -> float:
    """Return the positions that the rows of these chunks look back on, in all."""
    return sum(n * (s + n / 2) for s, n in zip(starts, lens, strict=True))


def num_alone(starts: Sequence[int], lens: Sequence[int]) -> float:
    """Return the positions that rows alone in a chunk look back on, in all."""
    return sum(s + 0.5 for s, n in zip(starts, lens, strict=True) if n == 1)


def path_of(name: str, form: str, kv_dtype: str) -> Path:
    """Return where the step model of a model `name` in these forms on this machine is kept."""
    if Path(name).expanduser().exists():
        name = str(Path(name).expanduser().resolve())
    key = "\n".join((name, form, kv_dtype, platform.machine(), platform.processor(), platform.node()))
    return FOLDER.expanduser() / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"


def path_of_engine(info: EngineInfo) -> Path:
    """Return the path at which the step model of a running engine is kept, by its `EngineInfo`."""
    form = f"engine {info.backend} {info.dtype} {info.quantization} {info.activations}"
    return path_of(info.model, form, info.kv_cache_dtype)


def save(path: Path, model: StepModel) -> None:
    """Write a step model. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(model))


def load(path: Path) -> StepModel | None:
    """Return the step model of a file; None if there is none. Raises `CheckpointError` for one that cannot be read."""
    if not path.is_file():
        return None
    try:
        model = msgspec.json.decode(path.read_bytes(), type=StepModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}; headrace plan --check writes it anew") from None
    if len(model.knots) != len(model.slopes):
        raise CheckpointError(f"{path}: knots and slopes differ in number; headrace plan --check writes it anew")
    return model
