"""Jina BERT v2: transformers has no class for it, so the oracle is torch's, written from the papers (ALiBi, arXiv
2108.12409; Jina Embeddings 2, arXiv 2310.19923) and not from the checkpoint's own code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.models.test_encoders import open_llm, texts_of, vectors
from tests.support.harness import BACKENDS
from torch import Tensor

from headrace.models import find
from headrace.protocol.errors import CheckpointError

TINY: dict[str, Any] = find("jina-bert-v2").TINY | {"model_type": "bert"}
SLOPES = {
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
}
"""Of 4 heads 2^-2, 2^-4, ...; two more have the first and third of those of 8: 2^-1, 2^-3."""


def save(directory: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a random checkpoint of the type, and return its tensors."""
    config = TINY | changes
    torch.manual_seed(0)
    width, inner = config["hidden_size"], config["intermediate_size"]
    norm = lambda name: {f"{name}.weight": (width,), f"{name}.bias": (width,)}  # noqa: E731
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "pooler.dense.weight": (width, width),
        **norm("embeddings.LayerNorm"),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{layer}.attention.{name}.weight": (width, width), f"{layer}.attention.{name}.bias": (width,)}
        shapes |= norm(f"{layer}.attention.output.LayerNorm") | norm(f"{layer}.mlp.layernorm")
        shapes |= {f"{layer}.mlp.gated_layers.weight": (2 * inner, width)}
        shapes |= {f"{layer}.mlp.wo.weight": (width, inner), f"{layer}.mlp.wo.bias": (width,)}
    tensors = {
        name: 0.3 * torch.randn(shape) + (1.0 if name.lower().endswith("norm.weight") else 0.0)
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def oracle(tensors: dict[str, Tensor], text: list[int], heads: int, act: Any = F.gelu, way: float = 1.0) -> list[float]:
    """The mean of the last hidden states, in float64. way: what the bias of later keys is multiplied by."""
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], TINY["layer_norm_eps"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    words, types = (t[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
    x = norm(words[text] + types[0], "embeddings.LayerNorm")
    distance = torch.arange(len(text))[None, :] - torch.arange(len(text))[:, None]
    length = torch.where(distance > 0, way * distance, -distance).double()
    for i in range(TINY["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").view(len(text), heads, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores - torch.tensor(SLOPES[heads], dtype=torch.float64)[:, None, None] * length
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = norm(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        gate, up = linear(x, f"{layer}.mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(act(gate) * up, f"{layer}.mlp.wo"), f"{layer}.mlp.layernorm")
    return x.mean(0).tolist()


def error(expected: list[list[float]], computed: list[list[float]]) -> float:
    right, mine = torch.tensor(expected), torch.tensor(computed)
    return float(((right - mine).abs().amax(1) / right.abs().amax(1)).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kind"), [(4, "geglu"), (6, "reglu")])
def test_vectors_are_those_of_the_papers(heads: int, kind: str, backend: str, tmp_path: Path) -> None:
    tensors = save(tmp_path, num_attention_heads=heads, feed_forward_type=kind)
    texts = texts_of((*range(1, 12), *range(20, 201, 20), 300))
    llm = open_llm(tmp_path, backend, max_num_batched_tokens=600)
    together = vectors(llm, texts, "mean")
    act = F.gelu if kind == "geglu" else F.relu
    assert error([oracle(tensors, text, heads, act) for text in texts], together) < 1e-5
    # Law: the batch, and what was computed before, change no bit.
    assert [vectors(llm, [text], "mean")[0] for text in texts[::5]] == together[::5]


def test_control_biases_of_one_way_are_noticed(tmp_path: Path) -> None:
    tensors, texts = save(tmp_path), texts_of((40,))
    assert error([oracle(tensors, texts[0], 4, way=0.0)], vectors(open_llm(tmp_path), texts, "mean")) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_type": "original"}, "feed_forward_type is 'original', expected one of geglu, reglu"),
        ({"architectures": ["JinaBertForSequenceClassification"]}, "a head for classes"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)
