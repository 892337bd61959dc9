"""The trainable Llama of `headrace.quantize.llama` (here with tied embeddings): first weights, and files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace.quantize import llama
from headrace.quantize.llama import MLP, Attention, Layer, LlamaShape, RMSNorm, causal_attention, rotary, rotate

__all__ = [
    "MLP", "Attention", "Layer", "Llama", "LlamaShape", "RMSNorm", "causal_attention", "load_model", "rotary",
    "rotate", "save_model",
]  # fmt: skip


class Llama(llama.Llama):
    def init_weights(self) -> None:
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 0.02 if "embed" in name else p.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    scale /= (2 * self.shape.num_hidden_layers) ** 0.5
                nn.init.normal_(p, std=scale)


def save_model(model: Llama, directory: Path) -> None:
    """model.safetensors in bfloat16, under Hugging Face's names."""
    tensors = {f"model.{n}": p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def load_model(directory: Path) -> Llama:
    """A Llama with tied embeddings from a Hugging Face directory, in float32."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"{directory}: only llama with tied embeddings")
    # The angles here are those of the context that the model was trained on.
    trained = (config.get("rope_scaling") or {}).get("original_max_position_embeddings")
    config["max_position_embeddings"] = trained or config["max_position_embeddings"]
    model = Llama(LlamaShape(**{k: config[k] for k in LlamaShape.__dataclass_fields__}))
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): t.float() for n, t in tensors.items() if n != "lm_head.weight"})
    return model
