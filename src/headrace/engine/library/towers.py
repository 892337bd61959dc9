"""Loads the tower of a model that reads pictures. Called by `load`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from headrace import gguf, hub
from headrace.backends import make_backend
from headrace.backends.base import Backend
from headrace.backends.places import table_of
from headrace.checkpoint import gguf_config, gguf_tower
from headrace.checkpoint.gguf_parts import FLOATS
from headrace.checkpoint.gguf_source import GGUFWeights
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.mapped import choose_dtype
from headrace.checkpoint.quantising import Loading
from headrace.checkpoint.reader import Reader
from headrace.checkpoint.source import naming
from headrace.checkpoint.tower import TowerCheckpoint
from headrace.models import Model, towers
from headrace.models.config import ModelConfig
from headrace.models.towers.base import Tower, take_pictures
from headrace.models.towers.rows import PictureRows
from headrace.protocol.config import DEQUANTIZE, EngineConfig
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import parse
from headrace.text.pictures import projectors
from headrace.text.pictures.forms import norm_of, picture_settings
from headrace.text.pictures.projectors import Projector

logger = logging.getLogger(__name__)

FORM = "int8"
"""The form of a tower's weights beside a quantised text."""


class Source(NamedTuple):
    """A tower's files. values: a config.json; settings: a preprocessor_config.json. projector: of a GGUF file."""

    path: Path
    values: dict[str, Any]
    settings: dict[str, Any]
    projector: Projector | None = None


def load_tower(config: EngineConfig, directory: Path, model: Model, text: Mapping[str, Any]) -> PictureRows | None:
    """Return the rows of pictures for `model`, which takes them from now on; None for a model that reads text only, or
    that several ranks compute, or whose tower cannot be read: a warning says why. Must come before its first
    program. text: the values of the text's config. Raises `ModelNotFoundError` and `CheckpointError` for a tower that
    the config names."""
    path = hub.projector_of(directory, config.mmproj)
    if config.mmproj == "none" or (path is None and not directory.is_dir()):
        return None
    reason = ""
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1 or config.rendezvous is not None:
        reason = "several ranks compute the model"
    if (config.limit_mm_per_prompt or {}).get("image") == 0:
        reason = "limit_mm_per_prompt allows none"
    try:
        source = _own_source(directory) if path is None else _projector_source(path, text)
        if source is None:
            return None
        if not source.settings:
            reason = reason or "the model's files have no preprocessor_config.json"
        if not reason:
            return _loaded(config, directory, model, source)
    except CheckpointError as error:
        if config.mmproj != "auto":
            raise
        # The text of the model is whole without it.
        reason = str(error)
    logger.warning("pictures are refused: %s", reason)
    return None


def _own_source(directory: Path) -> Source | None:
    values = hub.read_config(directory)
    if towers.find(values.get("model_type")) is None or not isinstance(values.get("vision_config"), dict):
        return None
    return Source(directory, values, picture_settings(directory))


def _projector_source(path: Path, text: Mapping[str, Any]) -> Source:
    projector = projectors.read(path)
    values = projector.values
    if "rms_norm_eps" in text:
        values["text_config"]["rms_norm_eps"] = text["rms_norm_eps"]
    return Source(path, values, projector.settings, projector)


def _loaded(config: EngineConfig, directory: Path, model: Model, source: Source) -> PictureRows:
    values, settings = source.values, source.settings
    kind, vision = towers.kind_of(values), values["vision_config"]
    backend, weights = _weights(config, directory, source, kind)
    if kind.sees_whole and not backend.sees_wholes:
        raise CheckpointError(f"rows see pictures whole, which {backend.name} does not compute as yet")
    with nullcontext() if source.projector is None else naming(source.path):
        tower: Tower = kind(ModelConfig(kind.defaults | vision), ModelConfig(values), weights, backend.ops)
        weights.finish()
        if tower.parts and backend.name == "cuda":
            raise CheckpointError("backend cuda has no room for a tower of several programs, as windows make it")
        if len(tower.further) > len(model.layers):
            raise CheckpointError(
                f"the tower's rows go behind {len(tower.further)} layers, the text has {len(model.layers)}"
            )
        if tower.text_size != model.hidden_size:
            raise CheckpointError(f"the tower's rows have {tower.text_size} numbers, the text's {model.hidden_size}")
    backend.choose_activations(tower, "auto", config.num_threads)
    if tower.side_of_row and table_of(model) is None:
        raise CheckpointError("config.json: mrope_section does not fit the heads of the text")
    take_pictures(model, len(tower.further), sees_wholes=kind.sees_whole)
    rows = PictureRows(
        tower, backend, norm_of(settings, str(values["model_type"])), model.no_features, config.num_threads
    )
    logger.info("pictures: the tower of %s, %.1f MB", values["model_type"], backend.ops.weight_bytes / 1e6)
    return rows


def _weights(config: EngineConfig, directory: Path, source: Source, kind: type[Tower]) -> tuple[Backend, Reader]:
    """Return the tower's backend and its weights. Beside a text of codes a tower in floats would take most of the
    time."""
    is_quantised = config.quantization not in (None, DEQUANTIZE) or _has_codes(directory)
    spare, projector = re.compile(kind.spare), source.projector
    if projector is None:
        checkpoint = TowerCheckpoint(source.path, kind.scaled)
        backend = make_backend(config.backend, config.device, choose_dtype(config.dtype, checkpoint, source.values))
        form = parse(FORM) if is_quantised and parse(FORM).layer in backend.schemes else None
        return backend, SafetensorsWeights(checkpoint, backend, None, Loading(quantization=form), spare)
    file = projector.file
    backend = make_backend(config.backend, config.device, gguf_config.choose_dtype(config.dtype, file))
    reading, exact = gguf_tower.read(file, projector.kind, source.values), config.quantization == DEQUANTIZE
    is_plain = all(part.info.type in FLOATS for part in reading.parts.values())
    form = parse(FORM) if is_quantised and is_plain and parse(FORM).layer in backend.schemes else None
    layout = gguf_tower.TowerFormat(file, reading, backend, exact, spare, kind.scaled)
    return backend, GGUFWeights(file, reading, backend, Loading(quantization=form), exact, layout)


def _has_codes(path: Path) -> bool:
    """Return whether a model's weights are stored as codes."""
    if path.is_file():
        return any(info.type not in FLOATS for info in gguf.read(path).tensors.values())
    return hub.read_config(path).get("quantization_config") is not None
