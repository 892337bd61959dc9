"""DistilBERT (Sanh et al. 2019): BERT without types of tokens, under other names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.config import ModelConfig
from headrace.models.encoders.base import MLP, Attention, Encoder, Keys, LayerNorm, PostNormLayer, WordLayers

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "distilbert",
    "vocab_size": 199,
    "dim": 48,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 512,
}


class Model(Encoder):
    keys = Keys("dim", "hidden_dim", "n_layers", "n_heads", "activation")
    word_layers = WordLayers("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias", None)

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        root = self.root_of("distilbert.")
        size = (config.integer("max_position_embeddings"), self.hidden_size)
        self.embedding = self.words(f"{root}embeddings.word_embeddings.weight")
        self.positions = weights.table(f"{root}embeddings.position_embeddings.weight", size)
        self.norm = LayerNorm(self, f"{root}embeddings.LayerNorm")
        self.layers = [self.layer(f"{root}transformer.layer.{i}", i) for i in range(self.num_layers)]
        self.make_head(("pre_classifier", "relu"), ("classifier", ""))

    def layer(self, name: str, layer_id: int) -> PostNormLayer:
        inputs = [f"{name}.attention.{part}_lin" for part in "qkv"]
        return PostNormLayer(
            Attention(self, layer_id, inputs, f"{name}.attention.out_lin"),
            LayerNorm(self, f"{name}.sa_layer_norm"),
            MLP(self, f"{name}.ffn.lin1", f"{name}.ffn.lin2"),
            LayerNorm(self, f"{name}.output_layer_norm"),
        )
