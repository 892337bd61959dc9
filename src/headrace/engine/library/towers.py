"""Loads the tower of a model that reads pictures. Called by `load`."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from headrace import hub
from headrace.backends import make_backend
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.mapped import choose_dtype
from headrace.checkpoint.quantising import Loading
from headrace.checkpoint.tower import TowerCheckpoint
from headrace.models import Model, towers
from headrace.models.config import ModelConfig
from headrace.models.towers.base import Tower, take_pictures
from headrace.models.towers.rows import PictureRows
from headrace.protocol.config import DEQUANTIZE, EngineConfig
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import parse
from headrace.text.pictures.forms import norm_of, picture_settings

logger = logging.getLogger(__name__)

FORM = "int8"
"""The form of a tower's weights beside a quantised text."""


def load_tower(config: EngineConfig, directory: Path, model: Model) -> PictureRows | None:
    """Return the rows of pictures for `model`, which takes them from now on; None for a model that reads text only, or
    that several ranks compute, or whose tower cannot be read: a warning says why. Must come before its first
    program."""
    if not directory.is_dir():
        return None
    values = hub.read_config(directory)
    module, vision = towers.find(values.get("model_type")), values.get("vision_config")
    settings = picture_settings(directory)
    if module is None or not isinstance(vision, dict):
        return None
    reason = "" if settings else "the model's files have no preprocessor_config.json"
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1 or config.rendezvous is not None:
        reason = "several ranks compute the model"
    if (config.limit_mm_per_prompt or {}).get("image") == 0:
        reason = "limit_mm_per_prompt allows none"
    try:
        if reason:
            raise CheckpointError(reason)
        return _loaded(config, directory, model, values, settings)
    except CheckpointError as error:
        # The text of the model is whole without it.
        logger.warning("pictures are refused: %s", error)
        return None


def _loaded(
    config: EngineConfig, directory: Path, model: Model, values: dict[str, Any], settings: dict[str, Any]
) -> PictureRows:
    kind, vision = towers.kind_of(values), values["vision_config"]
    checkpoint = TowerCheckpoint(directory, kind.scaled)
    backend = make_backend(config.backend, config.device, choose_dtype(config.dtype, checkpoint, values))
    if kind.sees_whole and not backend.sees_wholes:
        raise CheckpointError(f"rows see pictures whole, which {backend.name} does not compute as yet")
    spare = re.compile(kind.spare)
    # Beside a text of codes a tower in floats would take most of the time.
    is_quantised = config.quantization not in (None, DEQUANTIZE) or values.get("quantization_config") is not None
    form = parse(FORM) if is_quantised and parse(FORM).layer in backend.schemes else None
    weights = SafetensorsWeights(checkpoint, backend, None, Loading(quantization=form), spare)
    tower: Tower = kind(ModelConfig(kind.defaults | vision), ModelConfig(values), weights, backend.ops)
    weights.finish()
    if tower.text_size != model.hidden_size:
        raise CheckpointError(f"the tower's rows have {tower.text_size} numbers, the text's {model.hidden_size}")
    backend.choose_activations(tower, "auto", config.num_threads)
    take_pictures(model, sees_wholes=kind.sees_whole)
    rows = PictureRows(
        tower, backend, norm_of(settings, str(values["model_type"])), model.no_features, config.num_threads
    )
    logger.info("pictures: the tower of %s, %.1f MB", values["model_type"], backend.ops.weight_bytes / 1e6)
    return rows
