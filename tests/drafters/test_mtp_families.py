"""Layers for multi-token prediction of mixtures, latent and recurrent families: what the drafter foretells at every
depth is what transformers' own decoder layer gives in the published frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.drafters.play import spec_of, target_of
from tests.drafters.published import HIDDEN, VOCAB
from tests.drafters.test_published import Recording, agree, followed, foretold
from tests.support.harness import save_random
from tests.support.law import assert_same, run
from torch import Tensor

from headrace import models
from headrace.drafters import mtp
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Request

QWEN = {"layer_types": ["full_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "qwen3_next": QWEN | {"mlp_only_layers": []},
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
}
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
NEXT = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


class Frame(torch.nn.Module):
    """Two norms, a matrix, transformers' last decoder layer, and a norm."""

    def __init__(self, model: Any, feeds_normed: bool) -> None:
        super().__init__()
        self.model, self.layer, self.feeds_normed = model, model.model.layers[-1], feeds_normed
        eps = model.config.rms_norm_eps
        self.norms = torch.nn.ModuleList(type(model.model.norm)(HIDDEN, eps=eps) for _ in range(3))
        self.matrix = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in (*self.norms.parameters(), *self.matrix.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def tensors(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        parts = (self.norms[0], self.norms[1], self.matrix, self.norms[2])
        return {f"{name}.weight": part.weight.detach().clone() for name, part in zip(names, parts, strict=True)}

    @torch.inference_mode()
    def forward(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.matrix(torch.cat([self.norms[0](embedded), self.norms[1](features)], -1))[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        angles = self.model.model.rotary_emb(x, positions)
        x = self.layer(x, attention_mask=mask, position_embeddings=angles, position_ids=positions)
        x = (x[0] if isinstance(x, tuple) else x)[0]
        normed = self.norms[2](x)
        return (normed if self.feeds_normed else x), self.model.lm_head(normed)


def checkpoint(model_type: str, directory: Path) -> Frame:
    """A random model, whose last layer becomes that for multi-token prediction."""
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 600}
    model = save_random(models.find(model_type).TINY | sizes | TYPES[model_type], directory)
    is_qwen, last = model_type.startswith("qwen"), TYPES[model_type]["num_hidden_layers"] - 1
    frame = Frame(model, feeds_normed=is_qwen)
    root, block, names = ("mtp.", "mtp.layers.0.", NEXT) if is_qwen else (f"model.layers.{last}.",) * 2 + (DEEPSEEK,)
    tensors = load_file(directory / "model.safetensors")
    tensors = {name.replace(f"model.layers.{last}.", block): tensor.clone() for name, tensor in tensors.items()}
    tensors |= frame.tensors(tuple(root + name for name in names))
    save_file(tensors, str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": last}
    config |= {} if is_qwen else {"num_nextn_predict_layers": 1}
    config = {name: v[:last] if name in ("layer_types", "mlp_layer_types") else v for name, v in config.items()}
    (directory / "config.json").write_text(json.dumps(config))
    return frame


@pytest.mark.parametrize("model_type", TYPES)
def test_the_layer_in_the_targets_checkpoint(model_type: str, tmp_path: Path) -> None:
    frame = checkpoint(model_type, tmp_path)
    table = frame.model.model.embed_tokens.weight.detach()
    for backend in ("cpu", "torch_ref"):
        guide = Recording()
        drafter = mtp.make(spec_of(method="mtp"), target_of(tmp_path, backend, guide))
        tokens, features, drafted = foretold(drafter, guide, HIDDEN)
        expected = followed(frame, features, lambda ids: table[ids], tokens, drafted)
        assert agree(guide.seen, expected), backend
        frame.feeds_normed = not frame.feeds_normed
        wrong = followed(frame, features, lambda ids: table[ids], tokens, drafted)
        assert not agree(guide.seen, wrong)  # control: what the next guess goes on from counts
        frame.feeds_normed = not frame.feeds_normed


def requests() -> list[Request]:
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=list(range(3 + i, 40)),
            params=SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i, logprobs=2, ignore_eos=True),
        )
        for i in range(3)
    ]


def engine(directory: Path, spec: SpeculativeConfig | None) -> EngineCore:
    fields: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 8, "max_model_len": 200, "num_threads": 1}
    return build_engine(EngineConfig(model=str(directory), speculative_config=spec, **fields))


MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_5_moe_text"])
def test_an_engine_with_the_drafter_says_what_it_says_without(model_type: str, tmp_path: Path) -> None:
    checkpoint(model_type, tmp_path)
    results = []
    for spec in (None, MTP):
        core = engine(tmp_path, spec)
        results.append(run(core, requests()))
        assert (core.stats().num_draft_tokens > 0) == (spec is not None)
        core.close()
    assert_same(results[1], results[0])


def test_a_release_for_images_drafts_as_its_text_does(tmp_path: Path) -> None:
    """As Qwen3.5 and 3.6 are released: the text below a prefix, the layer beside it."""
    text, whole = tmp_path / "text", tmp_path / "whole"
    checkpoint("qwen3_5_moe_text", text)
    whole.mkdir()
    tensors = load_file(text / "model.safetensors")
    names = {name: name.replace("model.", "model.language_model.", 1) for name in tensors if name.startswith("model.")}
    save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, str(whole / "model.safetensors"))
    config = {"model_type": "qwen3_5_moe", "text_config": json.loads((text / "config.json").read_text())}
    (whole / "config.json").write_text(json.dumps(config))
    result = []
    for directory in (text, whole):
        # Adaptive drafts go by the time of steps.
        core = engine(directory, msgspec.structs.replace(MTP, adaptive=False))
        result.append((run(core, requests()), core.stats().num_draft_tokens, core.stats().num_accepted_tokens))
        core.close()
    assert result[0] == result[1]
    assert result[0][1] > 0
