"""The tower of Qwen3-VL (Qwen Team 2025): that of Qwen3.5, with rows of some layers that are added behind the text's
first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from headrace.models.config import ModelConfig
from headrace.models.towers import qwen3_5
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

KEY = "deepstack_visual_indexes"


class Tower(qwen3_5.Tower):
    defaults: ClassVar[dict[str, Any]] = qwen3_5.Tower.defaults | {KEY: [8, 16, 24]}

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        super().__init__(config, outer, weights, ops)
        layers = config.values[KEY]
        is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
        if not is_list or not all(0 <= layer < self.num_layers for layer in layers):
            raise CheckpointError(f"config.json: vision_config.{KEY} is {layers!r:.80}, expected numbers of layers")
        # The numbers of the first mergers are those of the layers that are met first.
        names = {layer: f"visual.deepstack_merger_list.{layers.index(layer)}" for layer in sorted(set(layers))}
        self.further = [(layer + 1, self.merger(name, f"{name}.norm")) for layer, name in names.items()]
