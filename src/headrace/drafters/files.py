"""Where a drafter's checkpoint is, and how it is read: as the target's, by names of its own.

Nothing in it is executed; pickles are refused with a hint (`checkpoint.mapped`). Layouts: docs/drafter-layouts.md.
Called by the drafters beside this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace import builtin, hub
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.drafters.base import Target
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.speculation import FIELD, SpeculativeConfig
from headrace.quant.schemes import parse

if TYPE_CHECKING:
    from headrace.checkpoint.loader import Weights

T = TypeVar("T")


def directory_of(spec: SpeculativeConfig, target: Target, folder: str) -> Path:
    """Where the drafter is that `spec` names; for the built-in model its own of this kind, if none is named.

    Raises `RequestError` if none is named and none is there, `ModelNotFoundError` for a name that leads nowhere.
    """
    if spec.model is not None:
        return hub.resolve(spec.model)
    if (own := own_of(target, folder)) is not None:
        return own
    raise RequestError(f"{FIELD}.model", None, f"a directory or hub id: the method {spec.method} needs a checkpoint")


def own_of(target: Target, folder: str) -> Path | None:
    """What ships beside the built-in model for a drafter of this kind, if it is the target."""
    own = builtin.PATH / "drafters" / folder
    return own if target.directory == builtin.directory() and own.is_dir() else None


def load(
    directory: Path,
    target: Target,
    quantization: str | None,
    quantization_config: Any,
    build: Callable[[Weights], T],
    spare: str | None = None,
) -> T:
    """`build` given the checkpoint's weights as the target's backend takes them. It takes all of them, but for those
    whose names match `spare`. Raises `CheckpointError`, or `RequestError` for a quantization that does not exist."""
    # It imports torch, which takes a second; early_exit and ngram do without.
    from headrace.checkpoint.loader import Checkpoint, Weights

    given = quantization not in (None, "none") and quantization_config is None
    wanted = parse(quantization) if quantization is not None and given else None
    weights = Weights(
        Checkpoint(directory),
        target.backend,
        quantization_config,
        quantization=wanted,
        spare=None if spare is None else re.compile(spare),
    )
    made = build(weights)
    weights.finish()
    return made


def integers(directory: Path, name: str, length: int) -> NDArray[np.int64] | None:
    """The tensor `name` of whole numbers [length], None if there is none. Raises `CheckpointError`."""
    checkpoint = MappedCheckpoint(directory)
    if name not in checkpoint.names:
        return None
    entry = checkpoint.entry(name)
    if entry.dtype not in ("I64", "I32") or entry.shape != (length,):
        raise CheckpointError(
            f"{directory}: {name} is {entry.dtype} of shape {list(entry.shape)}, expected whole numbers [{length}]"
        )
    return checkpoint.file(name).array(name).astype(np.int64)
