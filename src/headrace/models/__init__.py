"""Finds the model file of a model_type: one file per Hugging Face model_type, with its name; encoders in a folder.

A model file has `TINY`, a config.json small enough for tests, and `Model`, which implements the protocol below. Called
by `engine.library.load`. How to write one: docs/howto-add-a-model.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.backends.base import Array, Cache, LayerShape, Rows
from headrace.models.config import ModelConfig
from headrace.models.unread import Rules
from headrace.protocol.errors import CheckpointError
from headrace.protocol.kinds import CacheKind

if TYPE_CHECKING:
    from headrace.backends.base import Matrix, Ops

NOT_MODELS = {"axes", "config", "decoder", "gemma4_layers", "mamba", "mla", "recurrent", "rope", "unread", "weights"}


class Model(Protocol):
    """R rows of any sequences are computed together; each attends to the cache of its sequence only.

    Subclasses define the parts; the methods here call them in the order that almost all models have.
    """

    ops: Ops
    cache_shapes: Sequence[LayerShape]
    """The shapes of the cache for each layer."""
    kinds: tuple[CacheKind, ...] = (CacheKind(),)
    """The kinds of the layers: "all" first if there is one, then windows, the shortest first."""
    vocab_size: int
    hidden_size: int
    embedding: Array
    head: Matrix
    feature_size: int = 0
    """Width of `Rows.features`, the further input of drafters, of towers and of models that read pictures; else 0."""
    no_features: Any = 0.0
    """The features [F] of rows for which a step has none."""
    layers: Sequence[Callable[[Array, Rows, Sequence[Cache]], Array]]
    """x [R, H] -> x [R, H] each; layer i owns cache i, where layers that keep nothing are not counted."""

    both_ways: bool = False
    """Whether rows see later rows: of an encoder. Then a sequence is one chunk, of which all rows are read, and no
    token is drawn."""

    sees_wholes: bool = False
    """Whether rows of a picture see all rows of it, later ones too (`Chunks.wholes`)."""

    has_head: bool = True
    """Whether a decoder draws tokens; False for weights of its layers alone, which give vectors."""

    classifier: Any = None
    """A function: the pooled vector of a text [H], float64 on the host -> a number for each class; None for models
    without classes."""

    spare: str = "(?!)"
    """A regular expression for the names of tensors that the model leaves unread: of heads for other tasks."""

    unread: Rules = ()
    """Keys of config.json that the model does not read, and that can change its output."""

    @classmethod
    def max_positions(cls, config: ModelConfig) -> int:
        """Return the model's context in tokens. Raises `CheckpointError`."""
        return config.max_positions()

    def enter(self, rows: Rows) -> Array:
        """Rows -> the input of the first layer [R, H]."""
        ...

    def forward(self, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None) -> Array:
        """Rows -> hidden states [R, H]; writes their keys and values to `kv`, one cache for each layer. `streams` gets
        the residual stream [R, H] before each layer, and after the last."""
        return self.through(range(len(self.layers)), self.enter(rows), rows, kv, streams)

    def through(
        self, layer_ids: range, x: Array, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None
    ) -> Array:
        """The input x [R, H] of the first of `layer_ids` -> the output of the last of them; else as `forward`."""
        for i in layer_ids:
            if streams is not None:
                streams.append(x)
            x = self.layers[i](x, rows, kv)
        if streams is not None:
            streams.append(x)
        return x

    def logits(self, hidden: Array, rows: Array) -> Array:
        """hidden [R, H] and the indices of S rows -> their logits [S, V]."""
        return self.ops.linear(self.final(hidden, rows), self.head)

    def final(self, hidden: Array, rows: Array) -> Array:
        """hidden [R, H] and the indices of S rows -> [S, H] after the final norm."""
        ...


def names() -> list[str]:
    """Return every model_type of a decoder that headrace runs."""
    modules = (info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg)
    return sorted(name for name in modules if name not in NOT_MODELS and not name.startswith("_"))


def encoder_names() -> list[str]:
    """Return every model_type of an encoder that headrace runs."""
    folder = importlib.import_module(f"{__name__}.encoders")
    names = (info.name for info in pkgutil.iter_modules(folder.__path__))
    return sorted(SPELLINGS.get(name, name) for name in names if name not in ("base", "head"))


SPELLINGS = {"xlm_roberta": "xlm-roberta", "jina_bert_v2": "jina-bert-v2"}
"""Types that are not spelt like their files."""


def find(model_type: object) -> Any:
    """Return the module of `model_type`. Raises `CheckpointError` naming all model types."""
    known, encoders = names(), encoder_names()
    if model_type in encoders:
        return importlib.import_module(f"headrace.models.encoders.{str(model_type).replace('-', '_')}")
    if not isinstance(model_type, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", model_type) or model_type not in known:
        raise CheckpointError(
            f"config.json: model_type {model_type!r:.80} is not supported; supported are "
            f"{', '.join([*known, *encoders])}"
        )
    return importlib.import_module(f"headrace.models.{model_type}")
