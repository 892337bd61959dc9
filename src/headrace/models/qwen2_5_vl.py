"""The text of Qwen2.5-VL (Bai et al. 2025): Qwen2. Where there are no pictures, its three positions are one."""

from __future__ import annotations

from headrace.backends.base import RopeTable
from headrace.models import qwen2
from headrace.models.axes import in_sections
from headrace.models.config import ModelConfig

TINY = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48},
}


class Model(qwen2.Model):
    default_eps = 1e-5
    default_first_window = 80

    def placed(self, table: RopeTable, rope: ModelConfig) -> RopeTable:
        return in_sections(table, rope, (16, 24, 24))
