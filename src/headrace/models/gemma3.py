"""The text of Gemma 3 (Gemma Team 2025); `towers.gemma3` has its tower."""

from __future__ import annotations

from headrace.models import gemma3_text

TINY = {
    "model_type": "gemma3",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 512,
        "sliding_window": 31,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip


class Model(gemma3_text.Model):
    pass
