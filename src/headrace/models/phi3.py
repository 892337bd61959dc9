"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama whose q, k, v, and gate and up, are one layer each in the checkpoint."""

from __future__ import annotations

from headrace.models import mistral

TINY = {
    "model_type": "phi3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    "sliding_window": 41,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Model(mistral.Model):
    default_eps = 1e-5
    default_window = None
