"""Jina BERT v2 (Günther et al. 2023): BERT with a gated MLP, whose positions are biases of the scores: ALiBi (Press et
al. 2022), both ways. Its files have the type `bert` and the position_embedding_type `alibi`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.models.config import ModelConfig
from headrace.models.encoders import bert
from headrace.models.encoders.base import Attention, Encoder, GatedMLP, LayerNorm, PostNormLayer
from headrace.models.unread import Unread
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = bert.TINY | {"model_type": "jina-bert-v2", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}


class Model(Encoder):
    unread = (Unread("position_embedding_type", "alibi", "other positions of this type"), *bert.Model.unread[1:])

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        if self.num_classes:
            raise CheckpointError("config.json: architectures has a head for classes, expected a model of vectors")
        self.activation = config.choice("feed_forward_type", {"geglu": "gelu", "reglu": "relu"}, "original")
        root = self.root_of("bert.")
        types = self.type_rows(f"{root}embeddings.token_type_embeddings.weight")
        self.embedding = self.words(f"{root}embeddings.word_embeddings.weight")
        # The first type is added to all rows, at every position.
        self.positions = weights.constant_table(np.tile(types[0], (max_model_len, 1)))
        self.norm = LayerNorm(self, f"{root}embeddings.LayerNorm")
        self.bias = weights.constant(biases(self.num_heads, max_model_len))
        self.layers = [self.layer(f"{root}encoder.layer.{i}", i) for i in range(self.num_layers)]

    def layer(self, name: str, layer_id: int) -> PostNormLayer:
        inputs = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        return PostNormLayer(
            Attention(self, layer_id, inputs, f"{name}.attention.output.dense", by_distance=self.bias),
            LayerNorm(self, f"{name}.attention.output.LayerNorm"),
            GatedMLP(self, [f"{name}.mlp.gated_layers"], f"{name}.mlp.wo", down_bias=True),
            LayerNorm(self, f"{name}.mlp.layernorm"),
        )


def biases(num_heads: int, num_positions: int) -> NDArray[np.float32]:
    """Return the bias [num_heads, 2 * num_positions - 1] of each distance: less a slope of the head times its length.

    Of 2^k heads the slopes are the powers 1, 2, ... of 2^(-8 / 2^k). Further heads have every other one of the slopes
    of twice as many, from the first on.
    """
    power = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * power, 2)][: num_heads - power]
    lengths = np.abs(np.arange(1 - num_positions, num_positions)).astype(np.float32)
    return np.array(slopes, np.float32)[:, None] * -lengths
