"""The text of Gemma 4 (Google DeepMind 2026)."""

from __future__ import annotations

from headrace.models import gemma4_text

TINY = {
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "text_config": gemma4_text.TINY | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
    },
    "audio_config": None,
}  # fmt: skip


class Model(gemma4_text.Model):
    pass
