"""Qwen3-Next (Qwen Team 2025): the gated delta rule in three of four layers, gated attention in each fourth, and small
experts with a shared one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.backends.base import Array, Matrix
from headrace.models import qwen3_5_text
from headrace.models.decoder import Decoder, GatedMLP
from headrace.models.qwen2_moe import SharedExperts
from headrace.models.qwen3_moe import has_experts
from headrace.models.recurrent import GatedDelta
from headrace.models.weights import Linear, Weights

TINY = qwen3_5_text.TINY | {
    "model_type": "qwen3_next",
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


class Delta(GatedDelta):
    """Gated delta rule of a checkpoint whose rows lie by key head: its q, its k, and its value heads' v and z, or b and
    a."""

    def make_qkvz(self, weights: Weights, name: str, hidden: int) -> Matrix:
        if weights.has(f"{name}.in_proj_qkv.weight"):  # as newer GGUF files have it
            return super().make_qkvz(weights, name, hidden)
        values = self.values // self.heads.num_key_heads
        order = self.parts_of_heads([self.heads.key_dim, self.heads.key_dim, values, values])
        return weights.matrix(Linear([f"{name}.in_proj_qkvz"], hidden, [len(order)], orders=[order]))

    def make_ba(self, weights: Weights, name: str, hidden: int) -> Matrix:
        each = self.heads.num_heads // self.heads.num_key_heads
        order = self.parts_of_heads([each, each])
        return weights.matrix(Linear([f"{name}.in_proj_ba"], hidden, [len(order)], plain=True, orders=[order]))

    def parts_of_heads(self, sizes: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the order that puts rows which lie head by head, each with parts of `sizes`, part by part."""
        rows = np.arange(self.heads.num_key_heads * sum(sizes)).reshape(self.heads.num_key_heads, -1)
        return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])


class Layer(qwen3_5_text.Layer):
    Delta = Delta

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        if not has_experts(decoder.config, layer_id):
            return GatedMLP(decoder, f"{name}.mlp")
        return SharedExperts(decoder, f"{name}.mlp", renormalise=decoder.config.flag("norm_topk_prob", True))


class Model(qwen3_5_text.Model):
    Layer = Layer
