"""GPT-2 (Radford et al. 2019): learned positions, layer norms with biases, fused q/k/v, tanh-GELU, tied head.

Its linear layers are stored [in, out], and the keys of its config have other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace import models
from headrace.backends.base import Array, Cache, Heads, LayerShape, Rows, Scoring
from headrace.models.config import MAX_LAYERS, ModelConfig
from headrace.models.decoder import ACTIVATIONS
from headrace.models.unread import Alias, Unread, verify
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Matrix, Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "gpt2",
    "vocab_size": 199,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}


class LayerNorm:
    def __init__(self, model: Model, name: str) -> None:
        self.ops, self.eps = model.ops, model.eps
        self.weight = model.weights.tensor(f"{name}.weight", (model.hidden_size,))
        self.bias = model.weights.tensor(f"{name}.bias", (model.hidden_size,))

    def __call__(self, x: Array) -> Array:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, model: Model, name: str, layer_id: int) -> None:
        hidden, inner, linear = model.hidden_size, model.intermediate_size, model.linear
        self.ops, self.layer_id, self.kind = model.ops, layer_id, model.activation
        self.heads = Heads(model.num_heads, model.num_heads, model.hidden_size // model.num_heads)
        self.scoring = Scoring(model.scale / (layer_id + 1 if model.scale_by_layer else 1))
        self.attention_norm = LayerNorm(model, f"{name}.ln_1")
        self.qkv = linear(f"{name}.attn.c_attn", hidden, 3 * hidden)
        self.out = linear(f"{name}.attn.c_proj", hidden, hidden)
        self.mlp_norm = LayerNorm(model, f"{name}.ln_2")
        self.up = linear(f"{name}.mlp.c_fc", hidden, inner)
        self.down = linear(f"{name}.mlp.c_proj", inner, hidden)

    def attention(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, cache = self.ops, kv[self.layer_id]
        query = ops.rope_store(ops.linear(x, self.qkv), self.heads, rows, cache)
        return ops.linear(ops.attention(query, self.heads, rows, cache, self.scoring), self.out)

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops = self.ops
        x = x + self.attention(self.attention_norm(x), rows, kv)
        return x + ops.linear(ops.activation(ops.linear(self.mlp_norm(x), self.up), self.kind), self.down)


class Model(models.Model):
    unread = (
        Unread("add_cross_attention", False, "attention to another model's states"),
        Alias("hidden_size", "n_embd"),
        Alias("num_attention_heads", "n_head"),
        Alias("num_hidden_layers", "n_layer"),
    )

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        verify(config.values, self.unread)
        self.ops, self.weights = ops, weights
        self.hidden_size = config.integer("n_embd", 768)
        self.intermediate_size = config.integer("n_inner", 4 * self.hidden_size)
        self.num_heads = config.integer("n_head", 12)
        self.vocab_size = config.integer("vocab_size", 50257)
        self.eps = config.number("layer_norm_epsilon", 1e-5)
        self.activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
        if self.hidden_size % self.num_heads:
            raise CheckpointError(f"config.json: n_embd {self.hidden_size} is no multiple of n_head {self.num_heads}")
        head_dim = self.hidden_size // self.num_heads
        self.scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
        self.scale_by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
        num_layers = config.integer("n_layer", 12, high=MAX_LAYERS)
        self.cache_shapes = [LayerShape(self.num_heads, head_dim)] * num_layers
        # Checkpoints of the bare transformer have no prefix.
        root = "transformer." if weights.has_prefix("transformer.") else ""
        tied = config.flag("tie_word_embeddings", True)
        shape = (self.vocab_size, self.hidden_size)
        self.embedding, self.head = weights.ends(f"{root}wte", "lm_head", shape, tied=tied)
        self.positions = weights.table(f"{root}wpe.weight", (config.integer("n_positions", 1024), self.hidden_size))
        self.layers = [Layer(self, f"{root}h.{i}", i) for i in range(num_layers)]
        self.norm = LayerNorm(self, f"{root}ln_f")

    def linear(self, name: str, num_in: int, num_out: int) -> Matrix:
        return self.weights.matrix(Linear([name], num_in, [num_out], bias=True, transposed=True))

    def enter(self, rows: Rows) -> Array:
        embedding = self.ops.embedding
        return embedding(rows.token_ids, self.embedding) + embedding(rows.positions, self.positions)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.norm(self.ops.select(hidden, rows))
