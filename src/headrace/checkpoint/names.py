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

from headrace.quant.layer_names import GRANITE, PREFIXES

logger = logging.getLogger(__name__)

TOWER = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_encoder|vision_adapter|vision_projection|audio_tower|audio_model"
    r"|multi_modal_projector|mm_projector|connector|embed_vision|embed_audio|patch_merger)\..*"
)
EXPERTS = re.compile(r"(.+\.experts)\.(\w+_proj)(_bias)?")
MLX_EXPERTS = re.compile(r"(.+)\.switch_mlp\.(\w+_proj\.(?:weight|scales|biases))")
"""MLX's tensors of all experts, each part of a layer in one."""
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
            ours = ours.removesuffix(f"{theirs}.weight") + stacked if ours.endswith(f"{theirs}.weight") else ours
        if (mlx := MLX_EXPERTS.fullmatch(ours)) is not None and len(shape) == 3:
            places_by_name |= {f"{mlx[1]}.experts.{i}.{mlx[2]}": Place(name, i) for i in range(shape[0])}
            continue
        match = EXPERTS.fullmatch(ours)
        if match is None or len(shape) != (2 if match[3] else 3):
            places_by_name[ours] = Place(name)
            continue
        kind = "bias" if match[3] else "weight"
        places_by_name |= {f"{match[1]}.{i}.{match[2]}.{kind}": Place(name, i) for i in range(shape[0])}
    if left:
        logger.info("%d tensors belong to towers for pictures or sound and not to the text", left)
    return places_by_name


def tower_places(names: Iterable[str]) -> dict[str, Place]:
    """Return the place of each tensor of `names` that belongs to a tower, without the whole model's prefix. Gemma 3 has
    a matrix whose name ends as no other one's."""
    ours = {name: name.removeprefix("model.") for name in names if text_name(name) is None}
    return {re.sub(r"_projection_weight$", "_projection.weight", each): Place(name) for name, each in ours.items()}


def text_config(values: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the config of the text model from a config.json that may nest it. The model_type is the outer one if it is
    known, else the inner one; `bert` with biases for positions is `jina-bert-v2`, as llama.cpp names it."""
    if (values.get("model_type"), values.get("position_embedding_type")) == ("bert", "alibi"):
        values = values | {"model_type": "jina-bert-v2"}
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        return values
    outer = {name: values[name] for name in FROM_CONFIG if name in values}
    model_type = values.get("model_type")
    if model_type not in known and inner.get("model_type") in known:
        model_type = inner["model_type"]
    # The outer config has the flag whether the head is tied, if any has, and the settings of quantisation.
    first = {name: outer[name] for name in ("tie_word_embeddings", "quantization_config") if name in outer}
    return outer | inner | first | {"model_type": model_type}
