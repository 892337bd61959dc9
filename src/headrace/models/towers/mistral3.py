"""The tower of Mistral Small 3 (Mistral AI 2025): that of Pixtral (Agrawal et al. 2024), squares of patches joined, and
two layers.

Pixtral takes pictures of any size: heads turn by the line and the column of a patch. The id of a row is the number of
that pair, and the table of the rope has a row for each pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.backends.base import Array, Cache, RopeTable, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import ACTIVATIONS, RMSNorm
from headrace.models.encoders.base import Attention, GatedMLP
from headrace.models.towers import base
from headrace.models.towers.base import F32, MAX_PATCHES, Connector, PreNormLayer
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

MAX_SIDE = 128
"""Patches of a side; MAX_SIDE^2 is MAX_PATCHES."""
EPS = 1e-5
"""Of the tower's norms, fixed in the family's code."""


class PlacedAttention(Attention):
    """Attention in which heads turn by the places of rows, which are their ids, and not by their positions."""

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, cache = self.ops, kv[self.layer_id]
        by_place: Any = rows
        by_place = dataclasses.replace(by_place, rope_rows=by_place.token_ids)
        query = ops.rope_store(self.inputs(x), self.heads, by_place, cache, self.form)
        return ops.linear(ops.attention(query, self.heads, rows, cache, self.scoring), self.out)


def angles_of(theta: float, head_dim: int) -> F32:
    """Return the angles of all places [MAX_SIDE^2, head_dim / 2]: the even frequencies turn by the line, the odd ones
    by the column."""
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    lines, columns = np.divmod(np.arange(MAX_SIDE**2, dtype=np.float32)[:, None], MAX_SIDE)
    return np.concatenate([lines * frequencies[::2], columns * frequencies[1::2]], axis=1)


def rope_table(weights: Weights, angles: F32) -> RopeTable:
    """Return the table of these angles."""
    # In float64, so that all libraries round to the same float32.
    wide = angles.astype(np.float64)
    cos, sin = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
    return RopeTable(weights.constant(cos), weights.constant(sin))


class Tower(base.Tower):
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
    }
    default_activation = "gelu"
    default_layer = -1

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        super().__init__(config, outer, weights, ops)
        self.eps, self.vocab_size = EPS, MAX_SIDE**2
        head_dim = self.hidden_size // self.num_heads
        if config.integer("head_dim", head_dim) != head_dim or head_dim % 4:
            raise CheckpointError(
                f"config.json: vision_config.head_dim is {config.values.get('head_dim', head_dim)}, expected "
                f"hidden_size / num_attention_heads, {head_dim}, as a multiple of 4"
            )
        stated = outer.values.get("vision_feature_layer", self.default_layer)
        if stated != -1:
            raise CheckpointError(f"config.json: vision_feature_layer is {stated!r:.80}, expected -1")
        rope = config.rope
        rope.choice("rope_type", {"default": None, "axial": None}, "default")
        self.rope_table = rope_table(weights, angles_of(rope.number("rope_theta", 10000.0, low=1.0), head_dim))
        self.patch = self.patch_linear("vision_tower.patch_conv", bias=False)
        self.first_norm = self.norm_of("vision_tower.ln_pre")
        self.layers = [self.layer(f"vision_tower.transformer.layers.{i}", i) for i in range(self.num_layers)]
        self.connect()

    def connect(self) -> None:
        """Make what is behind the layers: rows are normed before they are joined."""
        outer, ops, name, hidden = self.outer, self.ops, "multi_modal_projector", self.hidden_size
        self.factor = outer.integer("spatial_merge_size", 2, high=MAX_SIDE)
        eps = outer.mapping("text_config").number("rms_norm_eps", EPS)
        self.last_norm = RMSNorm(self.weights, ops, f"{name}.norm", hidden, eps)
        width = self.factor**2 * hidden
        joined = self.weights.matrix(Linear([f"{name}.patch_merger.merging_layer"], width, [hidden]))
        through = base.two_layers(
            self, (f"{name}.linear_1", f"{name}.linear_2"), (hidden, self.text_size, self.text_size),
            outer.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            bias=outer.flag("multimodal_projector_bias", False),
        )  # fmt: skip
        self.connector = Connector(ops, width, self.text_size, lambda x: through(ops.linear(x, joined)))

    def norm_of(self, name: str) -> RMSNorm:
        return RMSNorm(self.weights, self.ops, name, self.hidden_size, EPS)

    def layer(self, name: str, layer_id: int) -> PreNormLayer:
        inputs, out = [f"{name}.attention.{part}_proj" for part in "qkv"], f"{name}.attention.o_proj"
        attention = PlacedAttention(self, layer_id, inputs, out, bias=False, rope_table=self.rope_table)
        up = [f"{name}.feed_forward.{part}_proj" for part in ("gate", "up")]
        mlp = GatedMLP(self, up, f"{name}.feed_forward.down_proj")
        return PreNormLayer(self.norm_of(f"{name}.attention_norm"), attention, self.norm_of(f"{name}.ffn_norm"), mlp)

    def enter(self, rows: Rows) -> Array:
        return self.first_norm(self.ops.linear(rows.features, self.patch))

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.last_norm(self.ops.select(hidden, rows))

    def places(self, height: int, width: int) -> list[int]:
        lines, columns = self.grid(height, width)
        return [line * MAX_SIDE + column for line in range(lines) for column in range(columns)]

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        """In a joined row the numbers of all neighbours follow each other, one dimension after the other."""
        rows = base.shuffled(hidden, *self.grid(height, width), self.factor)
        return rows.reshape(len(rows), self.factor**2, -1).transpose(0, 2, 1).reshape(len(rows), -1)

    def num_rows(self, height: int, width: int) -> int:
        lines, columns = self.grid(height, width)
        if (
            max(lines, columns) > MAX_SIDE
            or lines * columns > MAX_PATCHES
            or lines % self.factor
            or columns % self.factor
        ):
            return 0
        return lines * columns // self.factor**2
