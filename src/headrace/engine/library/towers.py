"""Loads the tower of a model that reads pictures: `PictureRows` computes a picture's rows when a step first needs them.

The tower runs on the model's backend, on one picture or tile at a time: its rows depend on its pixels alone. Knows
pixels and programs; must not know requests. Made by `load`, called by the runner.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import hub
from headrace.backends import make_backend
from headrace.backends.base import Backend, SetUp
from headrace.backends.places import table_of
from headrace.backends.step import Chunks
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.mapped import choose_dtype
from headrace.checkpoint.tower import TowerCheckpoint
from headrace.drafters.features import RowProgram
from headrace.models import Model, towers
from headrace.models.config import ModelConfig
from headrace.models.towers.base import MAX_PATCHES, Tower, take_pictures
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError
from headrace.protocol.pictures import Picture
from headrace.text.pictures.forms import Norm, norm_of, picture_settings

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]
BLOCK = 256
"""Patches of a block of the tower's cache, which lasts for one call."""
MAX_READ = 128
"""Rows that are read at once."""
MAX_KEPT = 256 * 2**20
"""Bytes of rows that are kept: a long prompt's chunks, and other questions, need them again."""


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
    kind, vision = towers.find(values["model_type"]).Tower, values["vision_config"]
    checkpoint = TowerCheckpoint(directory, kind.scaled)
    own = make_backend(config.backend, config.device, choose_dtype(config.dtype, checkpoint, values))
    spare = re.compile(kind.spare)
    weights = SafetensorsWeights(checkpoint, own, None, spare=spare)
    tower: Tower = kind(ModelConfig(kind.defaults | vision), ModelConfig(values), weights, own.ops)
    weights.finish()
    if len(tower.further) > len(model.layers):
        raise CheckpointError(f"the tower's rows go behind {len(tower.further)} layers, the text has {len(model.layers)}")
    if tower.text_size != model.hidden_size:
        raise CheckpointError(f"the tower's rows have {tower.text_size} numbers, the text's {model.hidden_size}")
    own.choose_activations(tower, "auto", config.num_threads)
    if tower.side_of_row and table_of(model) is None:
        raise CheckpointError("config.json: mrope_section does not fit the heads of the text")
    take_pictures(model, len(tower.further))
    rows = PictureRows(tower, own, norm_of(settings, str(values["model_type"])), model.no_features, config.num_threads)
    logger.info("pictures: the tower of %s, %.1f MB", values["model_type"], own.ops.weight_bytes / 1e6)
    return rows


class PictureRows:
    """The rows that `tower` makes of pictures, with the features that the text's program reads them in."""

    def __init__(self, tower: Tower, backend: Backend, norm: Norm, blank: F32, num_threads: int) -> None:
        self.blank, self.side_of_row = blank, tower.side_of_row
        self._tower, self._norm = tower, norm
        num_blocks = -(-MAX_PATCHES // BLOCK)
        self._num_rows = MAX_PATCHES
        set_up = SetUp((num_blocks,), BLOCK, backend.dtype, MAX_READ, MAX_PATCHES, num_blocks, num_threads)
        self._program = backend.program(tower, set_up, [layer for layer, _ in tower.further])
        self._connector = RowProgram(tower.connector, backend, num_threads)
        self._further = [RowProgram(connector, backend, num_threads) for _, connector in tower.further]
        self._known: OrderedDict[str, F32] = OrderedDict()
        self._num_bytes = 0

    def features(self, picture: Picture) -> F32:
        known = self._known.pop(picture.digest, None)
        if known is None:
            known = self._computed(picture)
            self._num_bytes += known.nbytes
        self._known[picture.digest] = known
        while self._num_bytes > MAX_KEPT and len(self._known) > 1:
            self._num_bytes -= self._known.popitem(last=False)[1].nbytes
        return known

    def _computed(self, picture: Picture) -> F32:
        size, tower = (picture.height, picture.width), self._tower
        if tower.num_rows(*size) != picture.num_rows:
            raise ValueError(f"a picture of {size[0]} x {size[1]} pixels for {picture.num_rows} rows")
        pixels = np.frombuffer(picture.pixels, np.uint8).reshape(*size, 3)
        patches, places = tower.patches(normalised(pixels, self._norm)), tower.places(*size)
        if len(places) > self._num_rows:
            raise ValueError(f"a picture of {len(places)} patches, expected at most {self._num_rows}")
        rows = list(range(len(places)))
        blocks = list(range(-(-len(places) // BLOCK)))
        turned = tower.lines_and_columns(*size)
        observed = rows if self._further else ()
        self._program.forward(Chunks([0], [places], [blocks], later=rows, observed=observed, places=turned), [], patches)
        read = [self._program.hidden_states(rows[i : i + MAX_READ]).copy() for i in range(0, len(rows), MAX_READ)]
        layers = [np.concatenate(read)]
        if self._further:
            layers += np.split(self._program.features(rows), len(self._further), axis=1)
        merged = [tower.merged(hidden[tower.num_extra :], *size) for hidden in layers]
        connectors = [self._connector, *self._further]
        numbers = [connector.features(part) for connector, part in zip(connectors, merged, strict=True)]
        return np.concatenate([*numbers, np.zeros((len(merged[0]), 1), np.float32)], axis=1)

    def close(self) -> None:
        """Free the memory of the programs. May be called twice."""
        self._program.close()
        for connector in (self._connector, *self._further):
            connector.close()


def normalised(pixels: NDArray[np.uint8], norm: Norm) -> F32:
    """pixels [height, width, 3] -> (pixels * scale - mean) / deviation, as the processors compute them."""
    scaled = (pixels.astype(np.float64) * norm.scale).astype(np.float32)
    result: F32 = (scaled - np.asarray(norm.mean, np.float32)) / np.asarray(norm.deviation, np.float32)
    return result
