"""GTE (Zhang et al. 2024, mGTE): BERT with rotary positions and a gated MLP. Its first files have the type `new`, and
q, k and v, and up and gate, in one layer each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.models.config import ModelConfig
from headrace.models.encoders import bert
from headrace.models.encoders.base import Attention, Encoder, GatedMLP, LayerNorm, PostNormLayer
from headrace.models.unread import Rules, Unread
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = bert.TINY | {"model_type": "gte", "pad_token_id": 0}


class Names(NamedTuple):
    """Where a layout keeps the parts. qkv, gate_up: the layers that are stacked, or the layer that has all of them.
    up_first: whether up comes before gate in it."""

    embeddings_norm: str
    layers: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    gate_up: tuple[str, ...]
    down: str
    mlp_norm: str
    up_first: bool = False


NEWER = Names(
    "embeddings.LayerNorm",
    "layers",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    "post_mlp_layernorm",
)
FIRST = Names(
    "embeddings.LayerNorm",
    "encoder.layer",
    ("attention.qkv_proj",),
    "attention.o_proj",
    "attn_ln",
    ("mlp.up_gate_proj",),
    "mlp.down_proj",
    "mlp_ln",
    up_first=True,
)


class Model(Encoder):
    unread: Rules = (
        Unread("position_embedding_type", "rope", "positions that are learned"),
        Unread("layer_norm_type", "layer_norm", "other norms"),
        Unread("logn_attention_scale", False, "scores that are scaled by the length"),
    )
    roots: tuple[str, ...] = ("new.", "gte.")
    layouts = (NEWER, FIRST)
    default_theta = 160000.0
    bias, down_bias = True, True
    """Whether the layers of attention, and the last one of the MLP, have biases."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        root = self.root_of(*self.roots)
        names = next((each for each in self.layouts if weights.has_prefix(f"{root}{each.layers}.")), self.layouts[0])
        self.rope_table = self.rotary(self.rope(config))
        words, types = f"{root}embeddings.word_embeddings.weight", np.zeros((0, self.hidden_size), np.float32)
        if config.integer("type_vocab_size", 0, low=0):
            types = self.type_rows(f"{root}embeddings.token_type_embeddings.weight")
            # The first type is added to all rows, at every position.
            self.positions = weights.constant_table(np.tile(types[0], (max_model_len, 1)))
        self.embedding = self.typed_words(words, types)
        self.norm = LayerNorm(self, f"{root}{names.embeddings_norm}")
        self.layers = [self.layer(f"{root}{names.layers}.{i}", i, names) for i in range(self.num_layers)]
        self.make_head((f"{root}pooler.dense", "tanh"), ("classifier", ""))

    def rope(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of the positions. Of the type `ntk` (Su 2023, "RoPE as a beta-base encoding") the base is
        `factor` times as great, and all frequencies are divided by factor^(2 / dim)."""
        rope, dim = config.rope, self.hidden_size // self.num_heads
        if rope.values["rope_type"] != "ntk":
            return rope
        if rope.values.get("mixed_b") is not None:
            raise CheckpointError(
                "config.json: rope_scaling has mixed_b, expected none: that form is not computed here"
            )
        factor, theta = rope.number("factor", low=1.0), rope.number("rope_theta", self.default_theta, low=1.0)
        return ModelConfig({"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / dim)})

    def layer(self, name: str, layer_id: int, names: Names) -> PostNormLayer:
        qkv, gate_up = ([f"{name}.{part}" for part in parts] for parts in (names.qkv, names.gate_up))
        attention = Attention(
            self, layer_id, qkv, f"{name}.{names.out}", bias=self.bias, rope_table=self.rope_table
        )  # fmt: skip
        mlp = GatedMLP(self, gate_up, f"{name}.{names.down}", down_bias=self.down_bias, up_first=names.up_first)
        norms = (LayerNorm(self, f"{name}.{part}") for part in (names.attention_norm, names.mlp_norm))
        return PostNormLayer(attention, next(norms), mlp, next(norms))
