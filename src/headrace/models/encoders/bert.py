"""BERT (Devlin et al. 2019): learned positions, norms after attention and MLP, GELU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.config import ModelConfig
from headrace.models.encoders.base import MLP, Attention, Encoder, LayerNorm, PostNormLayer, WordLayers
from headrace.models.unread import Unread

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "bert",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


class Model(Encoder):
    unread = (
        Unread("position_embedding_type", "absolute", "positions relative to each other"),
        Unread("is_decoder", False, "this type as a decoder"),
        Unread("add_cross_attention", False, "attention to another model's states"),
    )
    roots: tuple[str, ...] = ("bert.",)
    word_layers: WordLayers | None = WordLayers(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
        activation=None,
    )
    first_position = 0
    """Row of the first position in the table of positions."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        root = self.root_of(*self.roots)
        parts, size = f"{root}embeddings", (config.integer("max_position_embeddings"), self.hidden_size)
        types = self.type_rows(f"{parts}.token_type_embeddings.weight")
        self.embedding = self.typed_words(f"{parts}.word_embeddings.weight", types)
        positions = weights.numbers(f"{parts}.position_embeddings.weight", size)[self.first_position :]
        self.positions = weights.constant_table(positions + types[0])
        self.norm = LayerNorm(self, f"{parts}.LayerNorm")
        self.layers = [self.layer(f"{root}encoder.layer.{i}", i) for i in range(self.num_layers)]
        self.read_head(root)

    def read_head(self, root: str) -> None:
        self.make_head((f"{root}pooler.dense", "tanh"), ("classifier", ""))

    def layer(self, name: str, layer_id: int) -> PostNormLayer:
        inputs = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        return PostNormLayer(
            Attention(self, layer_id, inputs, f"{name}.attention.output.dense"),
            LayerNorm(self, f"{name}.attention.output.LayerNorm"),
            MLP(self, f"{name}.intermediate.dense", f"{name}.output.dense"),
            LayerNorm(self, f"{name}.output.LayerNorm"),
        )
