"""Finds a drafter's checkpoint, and reads it as the target's is read, with other tensor names.

No code in it is run; pickles are refused with a hint (`checkpoint.mapped`). docs/maintainers/drafter-layouts.md has the
layouts. Called by the drafters of this folder.
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
from headrace.checkpoint.source import naming
from headrace.drafters.base import Target
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.speculation import FIELD, SpeculativeConfig
from headrace.quant.schemes import parse

if TYPE_CHECKING:
    from headrace.models.weights import SplitWeights

T = TypeVar("T")


def directory_of(spec: SpeculativeConfig, target: Target, folder: str) -> Path:
    """Return the directory of the drafter that `spec` names; by default the one that ships with the built-in model.

    Raises `RequestError` if none is named and none ships, `ModelNotFoundError` for a name that does not exist.
    """
    if spec.model is not None:
        return hub.resolve(spec.model)
    if (shipped := own_of(target, folder)) is not None:
        return shipped
    raise RequestError(f"{FIELD}.model", None, f"a directory or hub id: the method {spec.method} needs a checkpoint")


def own_of(target: Target, folder: str) -> Path | None:
    """Return the directory of the built-in model's drafter of this kind, if that model is the target."""
    path = builtin.PATH / "drafters" / folder
    return path if target.directory == builtin.directory() and path.is_dir() else None


def load(
    directory: Path,
    spec: SpeculativeConfig,
    target: Target,
    values: dict[str, Any],
    build: Callable[[SplitWeights], T],
    spare: str | None = None,
) -> T:
    """Return the model that `build` makes of the weights of a checkpoint with the config `values`, in the form of the
    target's backend. It has to take all weights but those whose names match `spare`. Raises `CheckpointError`, which
    names the directory, or `RequestError` for an unknown quantization."""
    from headrace.checkpoint.loader import SafetensorsWeights
    from headrace.checkpoint.quantising import Loading
    from headrace.checkpoint.tensors import Checkpoint

    quantization = spec.quantization or target.quantization
    quantization_config = values.get("quantization_config")
    is_plain = quantization in (None, "none") or quantization_config is not None
    loading = Loading(quantization=None if quantization is None or is_plain else parse(quantization))
    pattern = None if spare is None else re.compile(spare)
    with naming(directory):
        weights = SafetensorsWeights(Checkpoint(directory), target.backend, quantization_config, loading, pattern)
        result = build(weights)
        weights.finish()
    return result


def integers(directory: Path, name: str, length: int) -> NDArray[np.int64] | None:
    """Return the tensor `name` of integers [length], None if there is none. Raises `CheckpointError`."""
    checkpoint = MappedCheckpoint(directory)
    if name not in checkpoint.names:
        return None
    entry = checkpoint.entry(name)
    if entry.dtype not in ("I64", "I32") or entry.shape != (length,):
        raise CheckpointError(
            f"{directory}: {name} is {entry.dtype} of shape {list(entry.shape)}, expected whole numbers [{length}]"
        )
    return checkpoint.array(name).astype(np.int64)


def verify_token_ids(directory: Path, name: str, token_ids: NDArray[np.int64], target: Target) -> None:
    """Raise `CheckpointError` unless the tensor `name` maps a drafter's tokens to different ones of the target."""
    if len(np.unique(token_ids)) != len(token_ids) or token_ids.min() < 0 or token_ids.max() >= target.vocab_size:
        raise CheckpointError(f"{directory}: {name} does not lead to {len(token_ids)} tokens of {target.vocab_size}")
