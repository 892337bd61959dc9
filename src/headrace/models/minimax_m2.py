"""MiniMax-M2 (MiniMax 2025): norms over all of q and of k, heads that turn in part, experts chosen with a bias."""

from __future__ import annotations

from headrace.backends.base import Routing
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, PreNormLayer
from headrace.models.olmo2 import WideNormAttention
from headrace.models.unread import Alias

TINY = {
    "model_type": "minimax_m2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rotary_dim": 10,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> WideNormAttention:
        return WideNormAttention(decoder, name, layer_id)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Experts:
        """Make experts chosen by sigmoids plus a bias, weighted without the bias."""
        config, name = decoder.config, f"{name}.block_sparse_moe"
        num = config.integer("num_local_experts", 256, high=MAX_EXPERTS)
        bias = decoder.weights.tensor(f"{name}.e_score_correction_bias", (num,))
        routing = Routing(config.integer("num_experts_per_tok", 8), "sigmoid", bias)
        return Experts(decoder, name, num, decoder.intermediate_size, routing, parts=("w1", "w3", "w2"))


class Model(Decoder):
    Layer = Layer
    unread = (Alias("num_experts", "num_local_experts"),)
    default_theta = 5_000_000.0
    default_head_dim = 128

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        # The releases count the numbers of a head that turn; transformers 5 writes their share.
        factor = config.integer("rotary_dim", self.head_dim, low=2, high=self.head_dim) / self.head_dim
        return ModelConfig({"partial_rotary_factor": factor} | config.rope.values)
