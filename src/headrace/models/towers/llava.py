"""The towers of LLaVA 1.5 (Liu et al. 2023) and of what is built like it: CLIP (Radford et al. 2021), SigLIP (Zhai et
al. 2023) or Pixtral (Agrawal et al. 2024), whose rows of an inner layer go through two layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.backends.base import Array, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import ACTIVATIONS
from headrace.models.encoders.base import MLP, LayerNorm
from headrace.models.towers import base, mistral3
from headrace.models.towers.base import F32, Connector, PreNormLayer
from headrace.models.towers.idefics3 import siglip_layer
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

QUICK_GELU = "quick_gelu"


class QuickMLP(MLP):
    """down(act(up(x))), where act(x) = x * sigmoid(1.702 * x), a form of GELU (Hendrycks, Gimpel 2016)."""

    def __call__(self, x: Array) -> Array:
        inner = self.ops.linear(x, self.up)
        return self.ops.linear(self.ops.multiply(inner, self.ops.scale(inner, 1.702), "sigmoid"), self.down)


def connector_of(tower: base.Tower) -> Connector:
    """Return the two layers behind the tower."""
    outer, sizes = tower.outer, (tower.hidden_size, tower.text_size, tower.text_size)
    kind = outer.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    names = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
    through = base.two_layers(tower, names, sizes, kind, bias=outer.flag("multimodal_projector_bias", True))
    return Connector(tower.ops, tower.hidden_size, tower.text_size, through)


def verify_strategy(outer: ModelConfig, expected: str) -> None:
    """Raises `CheckpointError` for rows that the connector does not get."""
    stated = outer.values.get("vision_feature_select_strategy", "default")
    if stated != expected:
        raise CheckpointError(
            f"config.json: vision_feature_select_strategy is {stated!r:.80}, expected {expected!r} for this tower"
        )


class SiglipTower(base.Tower):
    """SigLIP; the layers behind vision_feature_layer are not computed."""

    defaults: ClassVar[dict[str, Any]] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    }
    spare = r"vision_tower\.(.+\.)?(layers\.\d+|post_layernorm|head|position_ids)(\..+)?"
    strategy = "full"

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        super().__init__(config, outer, weights, ops)
        verify_strategy(outer, self.strategy)
        self.num_sides = self.side(config, "image_size") // self.patch_size
        self.vocab_size = self.num_extra + self.num_sides**2
        root = "vision_tower.vision_model" if weights.has_prefix("vision_tower.vision_model.") else "vision_tower"
        self.root = root
        self.embed(f"{root}.embeddings")
        self.layers = [self.layer(f"{root}.encoder.layers.{i}", i) for i in range(self.depth())]
        self.connect()

    def connect(self) -> None:
        """Read what is behind the layers."""
        self.connector = connector_of(self)

    def depth(self) -> int:
        """Return the number of layers whose output the connector gets."""
        stated, num = self.outer.values.get("vision_feature_layer", -2), self.num_layers
        depth = stated % (num + 1) if type(stated) is int and -num <= stated <= num else 0
        if not depth:
            raise CheckpointError(
                f"config.json: vision_feature_layer is {stated!r:.80}, expected one layer of {num}, as 1 to {num} or "
                f"{-num} to -1"
            )
        return depth

    def embed(self, name: str) -> None:
        """Read what makes rows of patches."""
        self.patch = self.patch_linear(f"{name}.patch_embedding")
        self.embedding = self.weights.table(f"{name}.position_embedding.weight", (self.vocab_size, self.hidden_size))

    def layer(self, name: str, layer_id: int) -> PreNormLayer:
        return siglip_layer(self, name, layer_id)

    def enter(self, rows: Rows) -> Array:
        return self.ops.linear(rows.features, self.patch) + self.ops.embedding(rows.token_ids, self.embedding)

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        return hidden

    def num_rows(self, height: int, width: int) -> int:
        sides = self.grid(height, width)
        return self.num_sides**2 if sides == (self.num_sides, self.num_sides) else 0


class ClipTower(SiglipTower):
    """CLIP: a class token before the patches, and a norm before the layers."""

    defaults: ClassVar[dict[str, Any]] = SiglipTower.defaults | {"patch_size": 32}
    activations: ClassVar[dict[str, Any]] = ACTIVATIONS | {QUICK_GELU: QUICK_GELU}
    default_activation, default_eps = QUICK_GELU, 1e-5
    strategy, num_extra = "default", 1

    def embed(self, name: str) -> None:
        width = self.hidden_size
        self.patch = self.patch_linear(f"{name}.patch_embedding", bias=False)
        rows = self.weights.numbers(f"{name}.position_embedding.weight", (self.vocab_size, width)).copy()
        rows[0] += self.weights.numbers(f"{name}.class_embedding", (width,))
        self.embedding = self.weights.constant_table(rows)
        # So it is spelt in the files.
        self.first_norm = LayerNorm(self, f"{name.removesuffix('embeddings')}pre_layrnorm")

    def layer(self, name: str, layer_id: int) -> PreNormLayer:
        return siglip_layer(self, name, layer_id, QuickMLP if self.activation == QUICK_GELU else MLP)

    def enter(self, rows: Rows) -> Array:
        return self.first_norm(super().enter(rows))


class PixtralTower(mistral3.Tower):
    """Pixtral as Pixtral 12B has it: no patches are joined."""

    default_layer = -2

    def connect(self) -> None:
        verify_strategy(self.outer, "full")
        self.factor, self.connector = 1, connector_of(self)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)


KINDS: dict[str, Any] = {
    "clip_vision_model": ClipTower,
    "siglip_vision_model": SiglipTower,
    "pixtral": PixtralTower,
}


def choose(vision: Mapping[str, Any]) -> type[base.Tower]:
    """Return the tower of a vision_config. Raises `CheckpointError`."""
    kind: type[base.Tower] = ModelConfig(dict(vision)).choice("model_type", KINDS, "clip_vision_model")
    return kind
