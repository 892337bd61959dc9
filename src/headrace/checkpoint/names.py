"""The names by which a model file takes tensors, and the tensors of a checkpoint where they lie.

A checkpoint of a model with a tower for images or sound has its text model below a prefix, and its experts may be one
tensor with one more dimension. Such names become a text model's names here, with one for each expert. Knows names and
shapes; must not know files or models. Called by `checkpoint.mapped`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
TOWER = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_encoder|vision_adapter|vision_projection|audio_tower|audio_model"
    r"|multi_modal_projector|mm_projector|embed_vision|embed_audio|patch_merger)\..*"
)
EXPERTS = re.compile(r"(.+\.experts)\.(\w+_proj)(_bias)?")
GRANITE = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}
"""Granite's names of tensors with all experts, and the usual names."""
FROM_CONFIG = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "auto_map")
"""Keys of a config.json that apply to text and towers together."""


class Place(NamedTuple):
    """The tensor `name` of a file; `part`: an index in its first dimension, or None for all of it."""

    name: str
    part: int | None = None


def text_name(name: str) -> str | None:
    """Return the name that a tensor has in a model of text alone; None for one of a tower."""
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return None if TOWER.fullmatch(name) else name


def places(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> dict[str, Place]:
    """Return the place of each tensor of `names` that belongs to the text. Log a line about tensors of towers."""
    places_by_name: dict[str, Place] = {}
    left = 0
    for name in names:
        ours, shape = text_name(name), shapes[name]
        if ours is None:
            left += 1
            continue
        for theirs, stacked in GRANITE.items():
            ours = ours.removesuffix(theirs) + stacked if ours.endswith(theirs) else ours
        match = EXPERTS.fullmatch(ours)
        if match is None or len(shape) != (2 if match[3] else 3):
            places_by_name[ours] = Place(name)
            continue
        kind = "bias" if match[3] else "weight"
        places_by_name |= {f"{match[1]}.{i}.{match[2]}.{kind}": Place(name, i) for i in range(shape[0])}
    if left:
        logger.info("%d tensors of towers for images or sound are left out: headrace runs the text of this model", left)
    return places_by_name


def text_config(values: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the config of the text model from a config.json that may nest it. The model_type is the outer one if it is
    known, else the inner one."""
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        return values
    outer = {name: values[name] for name in FROM_CONFIG if name in values}
    model_type = values.get("model_type")
    if model_type not in known and inner.get("model_type") in known:
        model_type = inner["model_type"]
    # The outer config has the flag whether the head is tied, if any has.
    tied = {name: outer[name] for name in ("tie_word_embeddings",) if name in outer}
    return outer | inner | tied | {"model_type": model_type}
