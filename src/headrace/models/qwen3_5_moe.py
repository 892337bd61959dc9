"""Qwen3.5's and 3.6's mixtures of experts with a tower: their text is `qwen3_5_moe_text`, whose heads turn by three
positions."""

from __future__ import annotations

from headrace.backends.base import RopeTable
from headrace.models import qwen3_5, qwen3_5_moe_text
from headrace.models.axes import in_turn
from headrace.models.config import ModelConfig

TINY = qwen3_5.TINY | {
    "model_type": "qwen3_5_moe",
    "text_config": qwen3_5_moe_text.TINY | {"num_experts": 9, "linear_num_key_heads": 3},
}


class Model(qwen3_5_moe_text.Model):
    def placed(self, table: RopeTable, rope: ModelConfig) -> RopeTable:
        return in_turn(table, rope, (11, 11, 10))
