"""The tower of Llama 4 (Meta 2025): tiles, heads that turn by line and column, squares of patches joined, three layers.

The class token is the first row here and the last one in the checkpoint: rows see each other in no order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.backends.base import Array, Rows
from headrace.models.config import ModelConfig
from headrace.models.encoders.base import MLP, LayerNorm
from headrace.models.towers import base
from headrace.models.towers.base import F32, Connector, PreNormLayer
from headrace.models.towers.mistral3 import PlacedAttention, rope_table
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

EPS = 1e-5
"""Of all norms, fixed in the family's code, as the activation is."""


class Tower(base.Tower):
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_size": 768,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
    }
    default_activation = "gelu"
    num_extra = 1

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        super().__init__(config, outer, weights, ops)
        self.eps, self.activation, width = EPS, "gelu", self.hidden_size
        self.num_sides = self.side(config, "image_size") // self.patch_size
        self.vocab_size = self.num_sides**2 + 1
        self.factor = int(1 / config.number("pixel_shuffle_ratio", 0.5, low=0.01))
        self.verify()
        self.patch = self.patch_linear("vision_model.patch_embedding.linear", bias=False)
        places = weights.numbers("vision_model.positional_embedding_vlm", (self.vocab_size, width))
        first = places[-1:] + weights.numbers("vision_model.class_embedding", (width,))
        self.embedding = weights.constant_table(np.concatenate([first, places[:-1]]))
        self.first_norm = LayerNorm(self, "vision_model.layernorm_pre")
        self.last_norm = LayerNorm(self, "vision_model.layernorm_post")
        self.rope_table = rope_table(weights, self.angles(config.rope.number("rope_theta", 10000.0, low=1.0)))
        self.layers = [self.layer(f"vision_model.model.layers.{i}", i) for i in range(self.num_layers)]
        self.connector = self.connecting()

    def verify(self) -> None:
        """Raises `CheckpointError` for sizes that do not fit each other."""
        joined, head_dim = self.factor**2 * self.hidden_size, self.hidden_size // self.num_heads
        if self.intermediate_size != joined:
            raise CheckpointError(
                f"config.json: vision_config.intermediate_size is {self.intermediate_size}, expected that of joined "
                f"patches, {joined}"
            )
        if self.num_sides % self.factor:
            raise CheckpointError(
                f"config.json: vision_config.image_size has {self.num_sides} patches on a side, expected a multiple "
                f"of 1 / pixel_shuffle_ratio, {self.factor}"
            )
        if head_dim % 4:
            raise CheckpointError(
                f"config.json: vision_config has heads of {head_dim} numbers, expected a multiple of 4"
            )

    def angles(self, theta: float) -> F32:
        """Return the angles of all rows [R, head_dim / 2]: half of them turn by the column, half by the line, counted
        from 1. The class token does not turn."""
        half = self.hidden_size // self.num_heads // 2
        frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        lines, columns = np.divmod(np.arange(self.num_sides**2, dtype=np.float32)[:, None], self.num_sides)
        turned = np.concatenate([(columns + 1) * frequencies, (lines + 1) * frequencies], axis=1)
        return np.concatenate([np.zeros_like(turned[:1]), turned])

    def layer(self, name: str, layer_id: int) -> PreNormLayer:
        inputs, out = [f"{name}.self_attn.{part}_proj" for part in "qkv"], f"{name}.self_attn.o_proj"
        return PreNormLayer(
            LayerNorm(self, f"{name}.input_layernorm"),
            PlacedAttention(self, layer_id, inputs, out, paired=True, rope_table=self.rope_table),
            LayerNorm(self, f"{name}.post_attention_layernorm"),
            MLP(self, f"{name}.mlp.fc1", f"{name}.mlp.fc2"),
        )

    def connecting(self) -> Connector:
        config, ops, width = self.config, self.ops, self.intermediate_size
        inner, last = config.integer("projector_input_dim", 4096), config.integer("projector_output_dim", 4096)
        names, kind = ("vision_model.vision_adapter.mlp.fc1", "vision_model.vision_adapter.mlp.fc2"), self.activation
        through = base.two_layers(self, names, (width, inner, last), kind, bias=False)
        out = self.weights.matrix(Linear(["multi_modal_projector.linear_1"], last, [self.text_size]))
        return Connector(ops, width, self.text_size, lambda x: ops.linear(ops.activation(through(x), kind), out))

    def enter(self, rows: Rows) -> Array:
        patches = self.ops.linear(rows.features, self.patch)
        return self.first_norm(patches + self.ops.embedding(rows.token_ids, self.embedding))

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.last_norm(self.ops.select(hidden, rows))

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        return base.shuffled(hidden, *self.grid(height, width), self.factor)

    def num_rows(self, height: int, width: int) -> int:
        sides = self.grid(height, width)
        return (self.num_sides // self.factor) ** 2 if sides == (self.num_sides, self.num_sides) else 0
