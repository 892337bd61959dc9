"""Finds the model file for a model_type. One file per Hugging Face model_type, named like it.

A model file has `TINY`, a config.json small enough for tests, and `Model`, which meets the protocol below. Called by
`runner.build`. How to write one: docs/howto-add-a-model.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.backends.base import Ops
    from headrace.runner.inputs import ForwardBatch

NOT_MODELS = {"config", "rope", "decoder"}


class KVShape(NamedTuple):
    """What the cache must hold of each position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Model(Protocol):
    """A decoder. R rows of any sequences go through it together; each row sees its own sequence's cache only."""

    ops: Ops
    kv_shape: KVShape
    vocab_size: int

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Rows of `batch` -> hidden states [R, H]; writes their keys and values to `kv` [layers, 2, ...]."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden [R, H] and the indices of the rows that are wanted [S] -> logits [S, V] float32."""
        ...


def names() -> list[str]:
    """Every model_type that headrace runs."""
    found = (info.name for info in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name not in NOT_MODELS and not name.startswith("_"))


def find(model_type: object) -> Any:
    """The module of `model_type`. Raises `CheckpointError` naming those that exist."""
    known = names()
    if not isinstance(model_type, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", model_type) or model_type not in known:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(known)}"
        )
    return importlib.import_module(f"headrace.models.{model_type}")
