"""MPNet (Song et al. 2020): BERT without types of tokens, whose scores have a bias by relative position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.models.config import ModelConfig
from headrace.models.encoders.base import MLP, Attention, Encoder, LayerNorm, PostNormLayer, WordLayers

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "mpnet",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
    "layer_norm_eps": 1e-5,
}
NUM_BUCKETS = 32
"""Of which transformers uses as many, whatever relative_attention_num_buckets says."""
FIRST_POSITION = 2
"""Row of the first position in the table of positions: behind the padding's, whose id is always 1."""


class Model(Encoder):
    word_layers = WordLayers("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        root = self.root_of("mpnet.")
        parts, size = f"{root}embeddings", (config.integer("max_position_embeddings"), self.hidden_size)
        self.embedding = self.words(f"{parts}.word_embeddings.weight")
        positions = weights.numbers(f"{parts}.position_embeddings.weight", size)
        self.positions = weights.constant_table(positions[FIRST_POSITION:])
        self.norm = LayerNorm(self, f"{parts}.LayerNorm")
        rows = config.integer("relative_attention_num_buckets", NUM_BUCKETS, low=NUM_BUCKETS)
        table = weights.numbers(f"{root}encoder.relative_attention_bias.weight", (rows, self.num_heads))
        self.bias = weights.constant(np.ascontiguousarray(table[buckets(max_model_len)].T))
        self.layers = [self.layer(f"{root}encoder.layer.{i}", i) for i in range(self.num_layers)]
        self.make_head(("classifier.dense", "tanh"), ("classifier.out_proj", ""))

    def layer(self, name: str, layer_id: int) -> PostNormLayer:
        inputs = [f"{name}.attention.attn.{part}" for part in "qkv"]
        return PostNormLayer(
            Attention(self, layer_id, inputs, f"{name}.attention.attn.o", by_distance=self.bias),
            LayerNorm(self, f"{name}.attention.LayerNorm"),
            MLP(self, f"{name}.intermediate.dense", f"{name}.output.dense"),
            LayerNorm(self, f"{name}.output.LayerNorm"),
        )

    @classmethod
    def max_positions(cls, config: ModelConfig) -> int:
        return config.max_positions() - FIRST_POSITION


def buckets(num_positions: int) -> NDArray[np.int64]:
    """Return the bucket [2 * num_positions - 1] of each distance of a key from its query, from -(num_positions - 1) on.

    Half of the buckets are for later keys. Distances below 8 have one each; then they grow by the root of two, and the
    last has all from 91 on (Raffel et al. 2020, T5, with 32 buckets and the distance 128). In whole numbers: bucket 8 +
    k begins where n^2 >= 64 * 2^k.
    """
    distances = [abs(n) for n in range(1 - num_positions, num_positions)]
    of_length = np.array([n if n < 8 else min(15, 7 + (n * n >> 6).bit_length()) for n in distances])
    of_length[num_positions:] += NUM_BUCKETS // 2
    return of_length
