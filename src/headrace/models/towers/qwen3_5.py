"""The tower of Qwen3.5 and 3.6, and of Qwen3-VL (Qwen Team 2025): squares of patches side by side, each frame twice, a
learned grid of positions stretched to the picture's, and a rope by line and column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, RopeTable, Rows
from headrace.models.axes import by_axes
from headrace.models.config import ModelConfig
from headrace.models.encoders.base import MLP, Attention, LayerNorm
from headrace.models.rope import make_rope_table
from headrace.models.towers import base
from headrace.models.towers.base import F32, MAX_PATCHES, Connector, PreNormLayer
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

LONGEST = 4096
"""Patches of a side: the processor takes sides up to 200 to 1."""
NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth", "num_channels": "in_channels"}
"""What other towers call some of the sizes."""


class Tower(base.Tower):
    defaults: ClassVar[dict[str, Any]] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
    }

    patch_bias, has_embeddings = True, True

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        sizes = {ours: config.values[theirs] for ours, theirs in NAMES.items() if theirs in config.values}
        super().__init__(ModelConfig(sizes | dict(config.values)), outer, weights, ops)
        self.vocab_size, self.num_frames = 1, self.side(config, "temporal_patch_size")
        self.merge = config.integer("spatial_merge_size")
        self.side_of_row = self.merge * self.patch_size
        self.num_numbers = self.num_frames * self.feature_size
        self.feature_size = self.num_numbers
        self.patch = self.patch_linear("visual.patch_embed.proj", bias=self.patch_bias)
        if self.has_embeddings:
            self.feature_size += self.hidden_size
            num = config.integer("num_position_embeddings")
            self.num_sides = int(num**0.5)
            self.grid_rows = weights.numbers("visual.pos_embed.weight", (num, self.hidden_size))
        self.rope_table = self._rope_table()
        self.make_layers()
        self.connector = self.make_connector()
        if config.integer("out_hidden_size", self.text_size) != self.text_size:
            raise CheckpointError(
                f"config.json: vision_config.out_hidden_size is {config.values['out_hidden_size']}, the text has "
                f"{self.text_size}"
            )

    def _rope_table(self) -> RopeTable:
        """A quarter of a head's numbers are pairs that turn by the line, a quarter such by the column."""
        half = self.hidden_size // self.num_heads // 2
        if half % 2:
            raise CheckpointError(f"config.json: vision_config has heads of {2 * half} numbers, no multiple of 4")
        theta = self.config.rope.number("rope_theta", 10000.0, low=1.0)
        table = make_rope_table(ModelConfig({"rope_type": "default", "rope_theta": theta}), half, LONGEST, LONGEST)
        cos, sin = (np.concatenate([numbers, numbers], axis=1) for numbers in (table.cos, table.sin))
        placed = by_axes(RopeTable(cos, sin), np.repeat(np.arange(2), half // 2), MAX_PATCHES)
        return placed._replace(cos=self.weights.constant(placed.cos), sin=self.weights.constant(placed.sin))

    def make_layers(self) -> None:
        self.layers = [self.make_layer(f"visual.blocks.{i}", i) for i in range(self.num_layers)]

    def make_layer(self, name: str, layer_id: int) -> PreNormLayer:
        return PreNormLayer(
            LayerNorm(self, f"{name}.norm1"),
            Attention(self, layer_id, [f"{name}.attn.qkv"], f"{name}.attn.proj", rope_table=self.rope_table),
            LayerNorm(self, f"{name}.norm2"),
            MLP(self, f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2"),
        )

    def make_connector(self) -> Connector:
        self.norm = LayerNorm(self, "visual.merger.norm")
        return self.merger("visual.merger")

    def merger(self, name: str, norm: str = "") -> Connector:
        width, ops = self.merge**2 * self.hidden_size, self.ops
        layers = base.two_layers(
            self, (f"{name}.linear_fc1", f"{name}.linear_fc2"), (width, width, self.text_size), "gelu"
        )
        if not norm:
            return Connector(ops, width, self.text_size, layers)
        weight, bias = (self.weights.tensor(f"{norm}.{part}", (width,)) for part in ("weight", "bias"))
        return Connector(ops, width, self.text_size, lambda x: layers(ops.layer_norm(x, weight, bias, self.eps)))

    def enter(self, rows: Rows) -> Array:
        ops = self.ops
        if not self.has_embeddings:
            return ops.linear(rows.features, self.patch)
        patches = ops.linear(ops.columns(rows.features, 0, self.num_numbers), self.patch)
        return patches + ops.columns(rows.features, self.num_numbers, self.hidden_size)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.norm(self.ops.select(hidden, rows))

    def patches(self, pixels: F32) -> F32:
        """The numbers of each patch, channel by channel, each frame by frame, and behind them its place's embedding."""
        size, (lines, columns) = self.patch_size, self.grid(*pixels.shape[:2])
        parts = pixels.reshape(lines, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
        twice = np.repeat(parts.reshape(lines, columns, 3, 1, size * size), self.num_frames, axis=3)
        rows = twice.reshape(lines * columns, -1)
        if self.has_embeddings:
            rows = np.concatenate([rows, self._embeddings(lines, columns)], axis=1)
        return np.ascontiguousarray(rows[self.order(lines, columns)], np.float32)

    def _embeddings(self, lines: int, columns: int) -> F32:
        """Return the grid's embeddings between which each place lies, weighted by its distances, line by line."""
        (up, lower), (left, right) = self._between(lines), self._between(columns)
        total = np.zeros((lines, columns, self.hidden_size), np.float32)
        for line, of_line in (up, lower):
            for column, of_column in (left, right):
                rows = self.grid_rows[line[:, None] * self.num_sides + column]
                total += rows * (of_line[:, None] * of_column)[..., None]
        return total.reshape(lines * columns, -1)

    def _between(self, num: int) -> list[tuple[NDArray[np.int64], F32]]:
        """Return for `num` places the grid's places before and after each of them, and the weights of these."""
        exact = np.arange(num, dtype=np.float32) * np.float32(self.num_sides - 1) / np.float32(max(num - 1, 1))
        before = np.floor(exact)
        share, low = exact - before, before.astype(np.int64)
        return [(low, 1 - share), (np.minimum(low + 1, self.num_sides - 1), share)]

    def order(self, lines: int, columns: int) -> NDArray[np.int64]:
        """Return the patches' places, line by line, in the order of rows: square by square."""
        step = self.merge
        places = np.arange(lines * columns).reshape(lines // step, step, columns // step, step)
        order: NDArray[np.int64] = places.transpose(0, 2, 1, 3).ravel()
        return order

    def places(self, height: int, width: int) -> list[int]:
        lines, columns = self.grid(height, width)
        return [0] * (lines * columns)

    def turns(self, height: int, width: int) -> NDArray[np.int64]:
        lines, columns = self.grid(height, width)
        return np.stack(np.divmod(self.order(lines, columns), columns), axis=1)

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        """The patches of a square follow each other."""
        return hidden.reshape(-1, self.merge**2 * self.hidden_size)

    def num_rows(self, height: int, width: int) -> int:
        side = self.side_of_row
        is_taken = not height % side and not width % side and max(height, width) <= LONGEST * self.patch_size
        return (height // side) * (width // side) if is_taken else 0
