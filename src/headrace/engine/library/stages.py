"""Makes a rank's layers of a model, where ranks share them out: `stage_maker`. Called by `engine.library.load`.

Each rank computes the same shares by itself, from the tensors that the model file reads for each layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from headrace import models
from headrace.backends.base import Backend
from headrace.models.config import ModelConfig
from headrace.parallel.stages import LeavingWeights, Stage, StageSeat, StageWeights, divide, joined_layers
from headrace.plan.forms import Forms
from headrace.plan.layers import count_layers
from headrace.protocol.errors import CheckpointError, RequestError

logger = logging.getLogger(__name__)


def stage_maker(
    module: Any,
    model_config: ModelConfig,
    quantization: str | None,
    backend: Backend,
    max_model_len: int,
    seat: StageSeat,
) -> Callable[[LeavingWeights], models.Model]:
    """Return the function that makes the layers of a rank out of a model's weights. Raises `RequestError` for a backend
    that has no stages, and for more ranks than the model can be divided among."""
    take = getattr(backend, "take_stage", None)
    if take is None:
        raise RequestError("pipeline_parallel_size", seat.world, f"1 on backend {backend.name}")
    take()
    reads, head = count_layers(model_config.values, forms_of(model_config, quantization, backend.dtype))
    caches = [each.caches for each in reads]
    shares = divide([each.num_bytes for each in reads], head, seat.world, joined_layers(caches))
    mine = shares[seat.place]
    logger.info("layers %d to %d of %d", mine.start, mine.stop - 1, len(reads))
    # Rank 0 has the last stage.
    hosts = seat.hosts or (0,) * seat.world
    has_table = not mine.start or module.Model.through is not models.Model.through

    def make(weights: LeavingWeights) -> models.Model:
        some = StageWeights(weights, mine, len(reads), has_table)
        whole = module.Model(model_config, some, backend.ops, max_model_len)
        return Stage(whole, seat.place, shares, caches, [*hosts[1:], hosts[0]], seat.neighbours)

    return make


def forms_of(model_config: ModelConfig, quantization: str | None, dtype: str) -> Forms:
    """Return the forms by which layers are weighed: the plan's, or plain floats where the plan does not know them."""
    try:
        return Forms(dtype, quantization, model_config.values.get("quantization_config"))
    except CheckpointError as error:
        logger.info("layers are shared out as if they were floats: %s", error)
        return Forms(dtype, quantization)
