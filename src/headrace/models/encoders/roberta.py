"""RoBERTa (Liu et al. 2019): BERT whose positions are counted from behind the padding token's id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.config import ModelConfig
from headrace.models.encoders import bert
from headrace.models.encoders.base import WordLayers

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = bert.TINY | {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}


class Model(bert.Model):
    roots = ("roberta.",)
    word_layers = WordLayers("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        self.first_position = first_position(config)
        super().__init__(config, weights, ops, max_model_len)

    def read_head(self, root: str) -> None:
        self.make_head(("classifier.dense", "tanh"), ("classifier.out_proj", ""))

    @classmethod
    def max_positions(cls, config: ModelConfig) -> int:
        return config.max_positions() - first_position(config)


def first_position(config: ModelConfig) -> int:
    return config.integer("pad_token_id", 1, low=0) + 1
