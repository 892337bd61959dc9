"""The tower of Qwen2.5-VL (Bai et al. 2025): Qwen3.5's without learned positions, with RMS norms and gated MLPs, and in
most layers a patch sees its window alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array
from headrace.models.config import ModelConfig
from headrace.models.decoder import RMSNorm
from headrace.models.encoders.base import Attention, GatedMLP
from headrace.models.towers import base, qwen3_5
from headrace.models.towers.base import F32, Connector, Part, PreNormLayer
from headrace.models.towers.rows import MAX_ROWS
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

KEY = "fullatt_block_indexes"


class Tower(qwen3_5.Tower):
    defaults: ClassVar[dict[str, Any]] = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        KEY: [7, 15, 23, 31],
    }
    default_activation = "silu"
    patch_bias, has_embeddings = False, False

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        if "text_config" not in outer.values:  # as the releases have it
            outer = ModelConfig(dict(outer.values) | {"text_config": dict(outer.values)})
        super().__init__(config, outer, weights, ops)

    def make_layers(self) -> None:
        config = self.config
        # Rows of a window follow each other, in squares that become one row.
        self.window = config.integer("window_size") // self.side_of_row
        if not 1 <= self.window * self.merge <= int(MAX_ROWS**0.5):
            raise CheckpointError(
                f"config.json: vision_config.window_size is {config.values['window_size']}, expected one to "
                f"{int(MAX_ROWS**0.5)} patches, in squares of {self.side_of_row} pixels"
            )
        whole = config.values[KEY]
        if not isinstance(whole, list | tuple) or not all(type(i) is int and 0 <= i < self.num_layers for i in whole):
            raise CheckpointError(f"config.json: vision_config.{KEY} is {whole!r:.80}, expected numbers of layers")
        runs: list[tuple[bool, list[PreNormLayer]]] = []
        for i in range(self.num_layers):
            if not runs or runs[-1][0] != (i not in whole):
                runs.append((i not in whole, []))
            runs[-1][1].append(self.make_layer(f"visual.blocks.{i}", len(runs[-1][1])))
        (self.is_windowed, layers), *parts = runs
        self.layers = list(layers)
        self.parts = [Part(self, layers, is_windowed=is_windowed) for is_windowed, layers in parts]
        self.cache_shapes = list(self.cache_shapes)[: len(self.layers)]

    def make_layer(self, name: str, layer_id: int) -> PreNormLayer:
        gates = [f"{name}.mlp.{part}_proj" for part in ("gate", "up")]
        return PreNormLayer(
            RMSNorm(self.weights, self.ops, f"{name}.norm1", self.hidden_size, self.eps),
            Attention(self, layer_id, [f"{name}.attn.qkv"], f"{name}.attn.proj", rope_table=self.rope_table),
            RMSNorm(self.weights, self.ops, f"{name}.norm2", self.hidden_size, self.eps),
            GatedMLP(self, gates, f"{name}.mlp.down_proj", bias=True),
        )

    def make_connector(self) -> Connector:
        width, ops, num = self.merge**2 * self.hidden_size, self.ops, self.merge**2
        layers = base.two_layers(
            self, ("visual.merger.mlp.0", "visual.merger.mlp.2"), (width, width, self.text_size), "gelu"
        )
        norm = self.weights.tensor("visual.merger.ln_q.weight", (self.hidden_size,))
        return Connector(ops, width, self.text_size, lambda x: layers(ops.rms_norm(x, norm, self.eps, heads=num)))

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)

    def order(self, lines: int, columns: int) -> NDArray[np.int64]:
        """Return the patches' places, line by line, in the order of rows: windows, in these squares."""
        squares = super().order(lines, columns).reshape(-1, self.merge**2)
        return squares[self._squares(lines, columns)].ravel()

    def _squares(self, lines: int, columns: int) -> NDArray[np.int64]:
        """Return the numbers of the squares, line by line, in the order of rows."""
        return np.concatenate([window.ravel() for window in self._windows(lines, columns)])

    def _windows(self, lines: int, columns: int) -> list[NDArray[np.int64]]:
        step, shape = self.window, (lines // self.merge, columns // self.merge)
        squares = np.arange(shape[0] * shape[1]).reshape(shape)
        corners = [(line, column) for line in range(0, shape[0], step) for column in range(0, shape[1], step)]
        return [squares[line : line + step, column : column + step] for line, column in corners]

    def windows(self, height: int, width: int) -> list[int]:
        return [self.merge**2 * window.size for window in self._windows(*self.grid(height, width))]

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        """The squares line by line."""
        rows = super().merged(hidden, height, width)
        return rows[np.argsort(self._squares(*self.grid(height, width)))]
