"""The tower of Idefics3 and SmolVLM (Laurençon et al. 2024; Marafioti et al. 2025): SigLIP over tiles, squares of
patches joined, and one linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Rows
from headrace.models.config import ModelConfig
from headrace.models.encoders.base import MLP, Attention, LayerNorm
from headrace.models.towers import base
from headrace.models.towers.base import F32, Connector, PreNormLayer
from headrace.models.weights import Linear

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights


def siglip_layer(tower: base.Tower, name: str, layer_id: int, mlp: type[MLP] = MLP) -> PreNormLayer:
    """A layer of SigLIP (Zhai et al. 2023)."""
    inputs = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
    return PreNormLayer(
        LayerNorm(tower, f"{name}.layer_norm1"),
        Attention(tower, layer_id, inputs, f"{name}.self_attn.out_proj"),
        LayerNorm(tower, f"{name}.layer_norm2"),
        mlp(tower, f"{name}.mlp.fc1", f"{name}.mlp.fc2"),
    )


class Tower(base.Tower):
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
    }

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        super().__init__(config, outer, weights, ops)
        self.factor = outer.integer("scale_factor", 2)
        self.num_sides = self.side(config, "image_size") // self.patch_size
        self.vocab_size = self.num_sides**2
        self.patch = self.patch_linear("vision_model.embeddings.patch_embedding")
        self.embedding = weights.table(
            "vision_model.embeddings.position_embedding.weight", (self.vocab_size, self.hidden_size)
        )
        self.layers = [siglip_layer(self, f"vision_model.encoder.layers.{i}", i) for i in range(self.num_layers)]
        self.norm = LayerNorm(self, "vision_model.post_layernorm")
        width = self.factor**2 * self.hidden_size
        joined = weights.matrix(Linear(["connector.modality_projection.proj"], width, [self.text_size]))
        self.connector = Connector(ops, width, self.text_size, lambda x: ops.linear(x, joined))

    def enter(self, rows: Rows) -> Array:
        return self.ops.linear(rows.features, self.patch) + self.ops.embedding(rows.token_ids, self.embedding)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.norm(self.ops.select(hidden, rows))

    def places(self, height: int, width: int) -> list[int]:
        """A tile of another size than the model's takes the embeddings of the places nearest to its patches'."""
        lines, columns = (self._buckets(num) for num in self.grid(height, width))
        return [int(line * self.num_sides + column) for line in lines for column in columns]

    def _buckets(self, num: int) -> NDArray[np.int64]:
        share = np.minimum(np.arange(num, dtype=np.float32) * np.float32(1 / num), np.float32(1 - 1e-6))
        bounds = np.arange(1, self.num_sides) * (1 / self.num_sides)
        buckets: NDArray[np.int64] = np.searchsorted(bounds.astype(np.float32), share, side="right")
        return buckets

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        return base.shuffled(hidden, *self.grid(height, width), self.factor)

    def num_rows(self, height: int, width: int) -> int:
        lines, columns = self.grid(height, width)
        is_square = lines == columns and not lines % self.factor
        return lines * columns // self.factor**2 if is_square else 0
