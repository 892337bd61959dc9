"""ELECTRA (Clark et al. 2020), its discriminator: BERT that was trained to find replaced tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.config import ModelConfig
from headrace.models.encoders import bert
from headrace.models.encoders.base import Encoder
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = bert.TINY | {"model_type": "electra", "embedding_size": 48}


class Model(bert.Model):
    roots = ("electra.",)
    word_layers = None
    spare = rf"{Encoder.spare}|(discriminator|generator)_\w+\..*"

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        narrow, width = config.integer("embedding_size", 128), config.integer("hidden_size")
        if narrow != width:
            raise CheckpointError(
                f"config.json: embedding_size is {narrow}, expected {width}, as hidden_size: a projection of the "
                "embeddings is not computed"
            )
        super().__init__(config, weights, ops, max_model_len)

    def read_head(self, root: str) -> None:
        self.make_head(("classifier.dense", "gelu"), ("classifier.out_proj", ""))
