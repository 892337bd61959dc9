"""The tower of InternVL 3 and 3.5 (Zhu et al. 2025): InternViT over tiles, squares of patches joined, and two layers.

Rows have a learned place, the class token's first; each layer's parts are scaled by learned factors (LayerScale,
Touvron et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.backends.base import Array, HeadNorm, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import ACTIVATIONS, RMSNorm
from headrace.models.encoders.base import MLP, Attention, LayerNorm
from headrace.models.towers import base
from headrace.models.towers.base import F32, Connector, PreNormLayer
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

QK_EPS, CONNECTOR_EPS = 1e-6, 1e-5
"""Fixed in the family's code."""
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}


class NormedAttention(Attention):
    """Attention with RMS norms over all queries of a row, and over all its keys."""

    def __init__(self, tower: Tower, layer_id: int, names: Sequence[str], out: str, norms: Sequence[str]) -> None:
        super().__init__(tower, layer_id, names, out, bias=tower.qkv_bias, out_bias=True)
        self.norms = [HeadNorm(tower.weights.tensor(norm, (tower.hidden_size,)), QK_EPS, 0.0) for norm in norms]

    def inputs(self, x: Array) -> Array:
        qkv, width = super().inputs(x), self.heads.num_heads * self.heads.head_dim
        for i, norm in enumerate(self.norms):
            qkv = self.ops.norm_columns(qkv, i * width, 1, norm)
        return qkv


class Tower(base.Tower):
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
    }
    scaled: ClassVar[dict[str, str]] = {
        r"(.+\.layer\.\d+)\.attention\.projection_layer\.(weight|bias)": r"\1.lambda_1",
        r"(.+\.layer\.\d+)\.mlp\.fc2\.(weight|bias)": r"\1.lambda_2",
    }
    spare = r".+\.(lambda_[12]|mask_token)"
    default_activation = "gelu"
    num_extra = 1

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        super().__init__(config, outer, weights, ops)
        self.qkv_bias = config.flag("attention_bias", False)
        self.num_sides = self.side(config, "image_size") // self.patch_size
        self.vocab_size = self.num_sides**2 + 1
        self.factor = int(1 / outer.number("downsample_ratio", 0.5, low=0.01))
        self.verify()
        root = "vision_tower.embeddings"
        self.patch = self.patch_linear(f"{root}.patch_embeddings.projection", bias=False)
        self.embedding = weights.constant_table(self.embeddings(root))
        self.layers = [self.layer(f"vision_tower.encoder.layer.{i}", i) for i in range(self.num_layers)]
        is_normed = not config.flag("use_mean_pooling", True)
        self.norm = LayerNorm(self, "vision_tower.layernorm") if is_normed else None
        self.connector = self.connecting("multi_modal_projector")

    def verify(self) -> None:
        """Raises `CheckpointError` for settings of other towers."""
        if self.num_sides % self.factor:
            raise CheckpointError(
                f"config.json: vision_config.image_size has {self.num_sides} patches on a side, expected a multiple "
                f"of 1 / downsample_ratio, {self.factor}"
            )
        stated = self.outer.values
        for name, expected in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
            if stated.get(name, expected) != expected:
                raise CheckpointError(f"config.json: {name} is {stated[name]!r:.80}, expected {expected!r}")

    def embeddings(self, root: str) -> F32:
        """Return what is added to each row: the class token and its place, then places with the patches' bias, which
        the class token's row has not."""
        width = self.hidden_size
        bias = self.weights.numbers(f"{root}.patch_embeddings.projection.bias", (width,))
        rows = np.concatenate(
            [self.weights.numbers(f"{root}.cls_token", (1, 1, width))[0], np.tile(bias, (self.vocab_size - 1, 1))]
        )
        if self.config.flag("use_absolute_position_embeddings", True):
            rows += self.weights.numbers(f"{root}.position_embeddings", (1, self.vocab_size, width))[0]
        return rows

    def layer(self, name: str, layer_id: int) -> PreNormLayer:
        inputs, out = [f"{name}.attention.{part}_proj" for part in "qkv"], f"{name}.attention.projection_layer"
        if self.config.flag("use_qk_norm", False):
            norms = [f"{name}.attention.{part}_norm.weight" for part in "qk"]
            attention: Attention = NormedAttention(self, layer_id, inputs, out, norms)
        else:
            attention = Attention(self, layer_id, inputs, out, bias=self.qkv_bias, out_bias=True)
        before, after = (self.norm_of(f"{name}.layernorm_{place}") for place in ("before", "after"))
        return PreNormLayer(before, attention, after, MLP(self, f"{name}.mlp.fc1", f"{name}.mlp.fc2"))

    def norm_of(self, name: str) -> Callable[[Array], Array]:
        if self.config.choice("norm_type", NORMS, "layer_norm") == "rms":
            return RMSNorm(self.weights, self.ops, name, self.hidden_size, self.eps)
        return LayerNorm(self, name)

    def connecting(self, name: str) -> Connector:
        ops, width = self.ops, self.factor**2 * self.hidden_size
        weight, bias = (self.weights.tensor(f"{name}.layer_norm.{part}", (width,)) for part in ("weight", "bias"))
        kind = self.outer.choice("projector_hidden_act", ACTIVATIONS, "gelu")
        names, sizes = (f"{name}.linear_1", f"{name}.linear_2"), (width, self.text_size, self.text_size)
        through = base.two_layers(self, names, sizes, kind)
        return Connector(ops, width, self.text_size, lambda x: through(ops.layer_norm(x, weight, bias, CONNECTOR_EPS)))

    def enter(self, rows: Rows) -> Array:
        return self.ops.linear(rows.features, self.patch) + self.ops.embedding(rows.token_ids, self.embedding)

    def final(self, hidden: Array, rows: Array) -> Array:
        chosen = self.ops.select(hidden, rows)
        return chosen if self.norm is None else self.norm(chosen)

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        return base.shuffled(hidden, *self.grid(height, width), self.factor)

    def num_rows(self, height: int, width: int) -> int:
        sides = self.grid(height, width)
        return (self.num_sides // self.factor) ** 2 if sides == (self.num_sides, self.num_sides) else 0
