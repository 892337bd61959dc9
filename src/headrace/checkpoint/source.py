"""Opens what a model's weights are read from: a packed file that fits, else the checkpoint itself.

Torch is imported only if the checkpoint must be read. Called by `engine.load`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from headrace.backends.base import Backend
from headrace.checkpoint.packed import Form, PackedWeights, PackedWriter, find
from headrace.checkpoint.packing import Origin, has_layouts
from headrace.protocol.errors import CheckpointError

logger = logging.getLogger(__name__)

MAX_FORETELLING = 64

T = TypeVar("T")


def with_weights(
    build: Callable[[Any], T],
    read: Callable[[PackedWriter | None], Any],
    checkpoint: Origin,
    backend: Backend,
    quantization: str | None,
    save_packed: bool,
    on_tensor: Callable[[int, int], None],
) -> T:
    """`build` given the weights of `checkpoint`, which `read` opens: `loader.Weights`, or what has its methods.

    A packed file beside the model is used where it fits; one is written if `save_packed` says so and none fits. `build`
    gets something with the same methods, and takes all of it. Raises `CheckpointError`.
    """
    layouts = backend.layouts()
    form = Form(quantization or "", backend.dtype, layouts)
    if has_layouts(backend):
        packed = find(checkpoint, form, backend)
        if packed is not None:
            try:
                packed.read(backend.allocate)
                weights = PackedWeights(packed, checkpoint, backend, on_tensor)
                made = build(weights)
                weights.finish()
                return made
            except CheckpointError as error:
                logger.warning("%s is not used, the weights are read from the checkpoint: %s", packed.path, error)
    with PackedWriter(checkpoint, form) if save_packed and layouts else nullcontext() as writer:
        opened = read(writer)
        made = build(opened)
        opened.finish()
    return made


def foretelling(values: dict[str, Any]) -> re.Pattern[str] | None:
    """Names of the layers for multi-token prediction that config.json's `values` tell of: a drafter reads them."""
    first, num = values.get("num_hidden_layers"), values.get("num_nextn_predict_layers")
    if type(first) is not int or type(num) is not int or not 0 < num <= MAX_FORETELLING:
        return None
    layers = "|".join(str(layer) for layer in range(first, first + num))
    return re.compile(rf"model\.(mtp_layers\.\d+|layers\.({layers}))\..*|mtp\..*")
