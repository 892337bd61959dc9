"""The text of Qwen3-VL (Qwen Team 2025): Qwen3. Where there are no pictures, its three positions are one."""

from __future__ import annotations

from headrace.backends.base import RopeTable
from headrace.models import qwen3
from headrace.models.axes import in_turn
from headrace.models.config import ModelConfig

TINY = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [4, 3, 3]},
    },
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48},
}


class Model(qwen3.Model):
    default_theta = 5_000_000.0

    def placed(self, table: RopeTable, rope: ModelConfig) -> RopeTable:
        return in_turn(table, rope, (24, 20, 20))
