"""Mixtral (Jiang et al. 2024): Mistral whose MLP is a mixture of experts, `num_experts_per_tok` for each row."""

from __future__ import annotations

from headrace.backends.base import Array
from headrace.models import mistral
from headrace.models.decoder import Decoder
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "mixtral",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


class Experts:
    """sum over the chosen experts e of softmax(router(x))_e * w2_e(act(w1_e x) * w3_e x), renormalised."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        weights, config = decoder.weights, decoder.config
        hidden, inner = decoder.hidden_size, decoder.intermediate_size
        num_experts = config.integer("num_local_experts", 8, high=4096)
        self.ops, self.kind = decoder.ops, decoder.activation
        self.top_k = config.integer("num_experts_per_tok", 2)
        if self.top_k > num_experts:
            raise CheckpointError(f"config.json: num_experts_per_tok is {self.top_k}, expected at most {num_experts}")
        self.router = weights.linear([f"{name}.gate"], hidden, [num_experts], plain=True)
        names = [f"{name}.experts.{e}" for e in range(num_experts)]
        self.gate_up = [weights.linear([f"{n}.w1", f"{n}.w3"], hidden, [inner, inner]) for n in names]
        self.down = [weights.linear([f"{n}.w2"], inner, [hidden]) for n in names]

    def __call__(self, x: Array) -> Array:
        return self.ops.experts(x, self.router, self.top_k, self.gate_up, self.down, self.kind)


class Layer(mistral.Layer):
    def make_mlp(self, decoder: Decoder, name: str) -> Experts:
        return Experts(decoder, f"{name}.block_sparse_moe")


class Model(mistral.Model):
    Layer = Layer
    default_theta = 1_000_000.0
    default_eps = 1e-5
    default_window = None
