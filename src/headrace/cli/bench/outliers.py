"""Plants outliers in a copy of a model: inputs that the norms give out become greater by a factor, and the columns
behind them less by it.

The factor is a power of two, so that the copy computes the same function to the bit, so any loss against the unchanged
model is due to the form. Called by `cli.bench.quality` and `bench.outliers`.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from headrace import hub
from headrace.protocol.errors import RequestError
from headrace.quantize import shards

NUM_INPUTS, FACTOR = 3, 64.0
"""The factor that is planted by default: it spoils int8 activations, and leaves the weights behind it some of their
codes."""
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose norms multiply with their weights, and are read by matrices of these names alone."""
READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
SEED = 7


def plant(source: Path, out: Path, num_inputs: int = NUM_INPUTS, factor: float = FACTOR) -> Path:
    """Write the model of directory `source` to the new directory `out`, with `num_inputs` inputs behind each layer's
    norms `factor` times as large. Return `out`.

    Weights of float16, which has few exponents, become float32. Raises `RequestError` for a model that is quantised or
    of another type than MODEL_TYPES, and for a factor that is no power of two.
    """
    values = {} if source.is_file() else hub.read_config(source)
    model_type = str(values.get("model_type", source.suffix))
    if model_type not in MODEL_TYPES or values.get("quantization_config") is not None:
        raise RequestError("outliers", str(source), f"a model of plain floats of type {', '.join(MODEL_TYPES)}")
    if math.frexp(factor)[0] != 0.5:
        raise RequestError("outliers", factor, "a power of two")
    width = int(values["hidden_size"])
    inputs = torch.randperm(width, generator=torch.Generator().manual_seed(SEED))[:num_inputs]
    out.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, out / path.name)
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        for name, weight in tensors.items():
            if name.endswith((*NORMS, *READERS)):
                planted = weight.float() if weight.dtype == torch.float16 else weight.clone()
                if name.endswith(NORMS):
                    planted[inputs] *= factor
                else:
                    planted[:, inputs] /= factor
                tensors[name] = planted
        shards.write(out / path.name, tensors)
    return out
