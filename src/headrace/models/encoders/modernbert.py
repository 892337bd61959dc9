"""ModernBERT (Warner et al. 2024): rotary positions, GeGLU, norms before each part; two of three layers see 64
positions to each side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.base import Array, Cache, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import ACTIVATIONS
from headrace.models.encoders.base import Attention, Encoder, GatedMLP, Keys, LayerNorm, WordLayers
from headrace.models.encoders.head import Head, Norm, dense
from headrace.models.unread import Unread
from headrace.protocol.errors import CheckpointError
from headrace.protocol.step import Pooling

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "modernbert",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "local_attention": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean"}
THETAS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x)). The first layer's input is normed already."""

    def __init__(self, model: Model, name: str, layer_id: int) -> None:
        bias = model.config.flag("attention_bias", False)
        kind = model.layer_type(layer_id)
        window = model.config.integer("local_attention", 128) // 2 if kind == "sliding_attention" else None
        self.norm = model.norm_of(f"{name}.attn_norm") if layer_id else None
        self.attention = Attention(
            model, layer_id, [f"{name}.attn.Wqkv"], f"{name}.attn.Wo",
            bias=bias, window=window, rope_table=model.rope_tables[kind],
        )  # fmt: skip
        self.mlp_norm = model.norm_of(f"{name}.mlp_norm")
        self.mlp = GatedMLP(model, [f"{name}.mlp.Wi"], f"{name}.mlp.Wo", bias=model.config.flag("mlp_bias", False))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.attention(x if self.norm is None else self.norm(x), rows, kv)
        return x + self.mlp(self.mlp_norm(x))


class Model(Encoder):
    keys = Keys(activation="hidden_activation", eps="norm_eps", default_eps=1e-5)
    unread = (Unread("position_embedding_type", "absolute", "positions relative to each other"),)

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        if config.flag("gives_word_weights", False):
            kind = config.choice("classifier_activation", ACTIVATIONS, "gelu")
            biased, normed = config.flag("classifier_bias", False), "bias" in self.norm_parts
            self.word_layers = WordLayers("head.dense", "head.norm", "decoder", "decoder.bias", kind, biased, normed)
        root = self.root_of("model.")
        self.rope_tables = {kind: self.rotary(self.rope_of(kind)) for kind in THETAS}
        self.embedding = self.words(f"{root}embeddings.tok_embeddings.weight")
        self.norm = self.norm_of(f"{root}embeddings.norm")
        self.layers = [Layer(self, f"{root}layers.{i}", i) for i in range(self.num_layers)]
        self.final_norm = self.norm_of(f"{root}final_norm")
        if self.num_classes:
            self.read_head()

    def read_head(self) -> None:
        width, weights = (self.hidden_size,), self.weights
        activation = str(self.config.values.get("classifier_activation", "gelu"))
        bias = self.config.flag("classifier_bias", False)
        first = dense(weights, "head.dense", width * 2, activation, bias=bias)
        numbers = {part: weights.numbers(f"head.norm.{part}", width).astype(np.float64) for part in self.norm_parts}
        norm = Norm(numbers["weight"], numbers.get("bias"), self.eps)
        last = dense(weights, "classifier", (self.num_classes, *width))
        pooling = self.config.choice("classifier_pooling", POOLINGS, "cls")
        self.classifier = Head((first._replace(norm=norm), last), pooling)

    @property
    def norm_parts(self) -> list[str]:
        return ["weight", "bias"] if self.config.flag("norm_bias", False) else ["weight"]

    def norm_of(self, name: str) -> LayerNorm:
        return LayerNorm(self, name, bias="bias" in self.norm_parts)

    def layer_type(self, layer_id: int) -> str:
        every = self.config.integer("global_attn_every_n_layers", 3)
        kinds = self.config.words("layer_types", self.num_layers)
        kind = kinds[layer_id] if kinds else "sliding_attention" if layer_id % every else "full_attention"
        if kind not in THETAS:
            raise CheckpointError(f"config.json: layer_types has {kind!r:.80}, expected {' or '.join(THETAS)}")
        return kind

    def rope_of(self, kind: str) -> ModelConfig:
        """Return the rope settings of the layers of a kind: in newer files by kind, in older ones a theta each."""
        key, theta = THETAS[kind]
        stated = self.config.mapping("rope_parameters").values.get(kind) or {}
        return ModelConfig({"rope_type": "default", "rope_theta": self.config.number(key, theta)} | stated)

    def last(self, hidden: Array, rows: Array) -> Array:
        return self.final_norm(self.ops.select(hidden, rows))
