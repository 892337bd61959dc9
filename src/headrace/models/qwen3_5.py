"""Qwen3.5 and 3.6 (Qwen Team 2026) with a tower: their text is `qwen3_5_text`, whose heads turn by three positions."""

from __future__ import annotations

from headrace.backends.base import RopeTable
from headrace.models import qwen3_5_text
from headrace.models.axes import in_turn
from headrace.models.config import ModelConfig

TINY = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": qwen3_5_text.TINY | {"rope_parameters": {
        "rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
    }},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48},
}  # fmt: skip


class Model(qwen3_5_text.Model):
    def placed(self, table: RopeTable, rope: ModelConfig) -> RopeTable:
        return in_turn(table, rope, (11, 11, 10))
