"""Write small random checkpoints with `transformers`, and a llama whose sizes every quantiser takes.

Knows nothing of headrace. `digests take` calls `write_all` once for a folder; what is there already stays.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 29,
}  # fmt: skip
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False} | COMMON,
    "mistral": {"model_type": "mistral", "head_dim": 12, "sliding_window": 37} | COMMON,
    "qwen2": COMMON | {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 21,
                       "max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3": COMMON | {"model_type": "qwen3", "num_attention_heads": 4, "head_dim": 20, "tie_word_embeddings": False},
    "gemma2": COMMON | GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 50.0,
                                "final_logit_softcapping": 30.0},
    "gemma3_text": COMMON | GEMMA | {"model_type": "gemma3_text", "num_key_value_heads": 1,
                                     "query_pre_attn_scalar": 16, "layer_types": LAYER_TYPES},
    "gpt2": {"model_type": "gpt2", "vocab_size": 199, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512,
             "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": COMMON | {"model_type": "mixtral", "intermediate_size": 80, "num_local_experts": 5,
                         "num_experts_per_tok": 2},
    "yarn": COMMON | {"model_type": "llama", "rope_parameters": YARN, "attention_bias": True},
    "wide": COMMON | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
                      "tie_word_embeddings": False},
}  # fmt: skip
"""The eight model types, a llama with a scaled rope and biases, and one wide enough for groups of 256 inputs."""


def write_all(directory: Path) -> None:
    """Write each checkpoint that `directory` lacks. The weights depend on the name's config alone."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        done = directory / name / "config.json"
        if not done.is_file() or not (directory / name / "model.safetensors").is_file():
            write_random(directory / name, config, seed)


def write_random(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Write a checkpoint with weights that give logits of about unit size, float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    scale = 1.4 / math.sqrt(config.get("hidden_size", 48))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * scale)
            else:
                parameter.copy_(parameter + 0.3 * noise if "norm" in name or "ln_" in name else 0.5 * noise)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
