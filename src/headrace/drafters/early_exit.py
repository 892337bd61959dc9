"""Drafts by the target's first layers, with its final norm and head (Draft & Verify, Zhang et al. 2024, arXiv
2309.08168; LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710).

Nothing is loaded: the matrices are the target's. Good for models that were trained to exit early; in other models the
first layers predict the output badly. Called by `drafters.speculator`.
"""

from __future__ import annotations

import copy
from pathlib import Path

from headrace import hub
from headrace.drafters.base import Target
from headrace.drafters.draft_model import TokenDrafter
from headrace.drafters.files import own_of
from headrace.models import Model
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.speculation import FIELD, SpeculativeConfig

FEWEST = 3
"""Fewest layers of the default: the first one or two predict little."""


def first_layers(model: Model, num_layers: int) -> Model:
    """Return a model of the first `num_layers` layers of another."""
    part = copy.copy(model)
    part.layers = model.layers[:num_layers]
    part.cache_shapes = model.cache_shapes[:num_layers]
    return part


def exit_of(directory: Path, num_layers: int) -> int:
    """Return the default exit: the layer that the model names, else a quarter of its layers (LayerSkip's 8 of Llama 2
    7B's 32), at least `FEWEST`, and always before the last.

    A checkpoint names it as transformers' `assistant_early_exit`, in generation_config.json. Raises `CheckpointError`.
    """
    path = directory / "generation_config.json"
    exit_layer = hub.read_json(path).get("assistant_early_exit") if path.is_file() else None
    if exit_layer is None:
        return max(num_layers // 4, min(FEWEST, num_layers - 1))
    if type(exit_layer) is not int or not 1 <= exit_layer < num_layers:
        bound = f"from 1 to {num_layers - 1}, the model has {num_layers} layers"
        raise CheckpointError(f"{path}: assistant_early_exit is {exit_layer!r}; it must be {bound}")
    return exit_layer


def make(spec: SpeculativeConfig, target: Target) -> TokenDrafter:
    """Make the drafter. Raises `RequestError` if `exit_layer` leaves no layer out, `CheckpointError` for a model that
    names an invalid exit."""
    num_layers = spec.exit_layer or exit_of(own_of(target, "early_exit") or target.directory, target.num_layers)
    if not 1 <= num_layers < target.num_layers:
        raise RequestError(
            f"{FIELD}.exit_layer", num_layers, f"from 1 to {target.num_layers - 1}, the model has {target.num_layers}"
        )
    model = first_layers(target.model, num_layers)
    window = min(spec.max_model_len, target.max_model_len - spec.num_drafts)
    return TokenDrafter(model, target.backend, spec, target, window)
