"""Qwen3-VL's mixtures of experts (Qwen Team 2025): Qwen3's. Releases have each expert's weights as [in, out],
transformers writes them as [out, in]."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array, RopeTable
from headrace.models import qwen3_moe
from headrace.models.axes import in_turn
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, GatedMLP

TINY = {
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": {name: value for name, value in qwen3_moe.TINY.items() if name != "norm_topk_prob"}
    | {
        "model_type": "qwen3_vl_moe_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [4, 3, 3]},
    },
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48},
}


class Layer(qwen3_moe.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        if not qwen3_moe.has_experts(decoder.config, layer_id):
            return GatedMLP(decoder, f"{name}.mlp")
        return qwen3_moe.make_experts(decoder, f"{name}.mlp", renormalise=True, by_shape=True)


class Model(qwen3_moe.Model):
    Layer = Layer
    default_theta = 500_000.0

    def placed(self, table: RopeTable, rope: ModelConfig) -> RopeTable:
        return in_turn(table, rope, (24, 20, 20))

    def default_layer_type(self, layer_id: int) -> str:
        return "full_attention"
