"""training/finetune_quantised.py on a tiny model: it begins where rounding to nearest ends, and loses less after."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.checkpoints import llama_tensors, write_llama

from headrace.backends.torch_ref.tensors import tensor
from headrace.quantize.base import Options
from headrace.quantize.driver import _File, quantise_checkpoint
from headrace.quantize.writers import compressed_tensors

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OPTIONS = Options(method="rtn", bits=3, group_size=32, symmetric=True, scale_dtype=torch.bfloat16)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "training"), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("finetune_quantised")
    for name in set(sys.modules) - before:
        if name in ("finetune_quantised", "model"):
            del sys.modules[name]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {name: 2 * t if t.dim() == 2 else t for name, t in llama_tensors(CONFIG, torch.bfloat16).items()}
    tensors.pop("lm_head.weight", None)
    output = {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    return write_llama(tmp_path / "model", tensors, **CONFIG, **output)


def test_it_begins_at_round_to_nearest_and_ends_below(script: ModuleType, source: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    teacher = script.load_model(source).requires_grad_(False)
    student = script.rounded_copy(teacher, OPTIONS)
    plain = student.embed_tokens.weight.clone()
    script.export(student, source, tmp_path / "begun", OPTIONS)
    quantise_checkpoint(source, tmp_path / "rtn", Options(method="rtn", bits=3, group_size=32), "compressed-tensors")
    start, rtn = (weights_of(tmp_path / name) for name in ("begun", "rtn"))
    assert start.keys() == rtn.keys()
    assert all(torch.equal(start[name], rtn[name]) for name in rtn)
    rows = torch.randint(0, 64, (24, 32))
    before, after = script.finetune(student, teacher, rows, minutes=1, steps=40, lr=3e-3)
    assert after < 0.8 * before
    script.export(student, source, tmp_path / "tuned", OPTIONS)
    # What is written is what was judged, and what was not trained is as it was.
    again = script.load_model(source)
    again.load_state_dict(
        {n: weights_of(tmp_path / "tuned").get(f"model.{n}", t) for n, t in again.state_dict().items()}
    )
    with torch.no_grad():
        result = float(script.divergence(again, teacher, rows[:12]))
    assert result == pytest.approx(after, rel=1e-3)
    assert torch.equal(student.embed_tokens.weight, plain)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The quantised layers, as the reader has them."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    result = {}
    for path in directory.glob("*.safetensors"):
        file = _File(path)
        names = [name.removesuffix(".weight_packed") for name in file._file.entries if name.endswith(".weight_packed")]
        result |= {f"{name}.weight": tensor(compressed_tensors.read(file, name, config).dequantize()) for name in names}
    return result


def test_gradients_go_past_the_rounding(script: ModuleType) -> None:
    linear = torch.nn.Linear(32, 4, bias=False)
    layer = script.RoundedLinear(linear, OPTIONS, "a")
    layer(torch.randn(5, 32)).square().sum().backward()
    assert float(layer.weight.grad.abs().sum()) > 0
    assert float(layer.log_scale.grad.abs().sum()) > 0


def test_training_goes_on_where_it_was_broken_off(
    script: ModuleType, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a run that ended at its half, and went on, are those of one that never stopped, to the bit."""
    teacher = script.load_model(source).requires_grad_(False)
    rows = torch.randint(0, 64, (24, 32), generator=torch.Generator().manual_seed(2))

    def trained(state: Any) -> Any:
        student = script.rounded_copy(teacher, OPTIONS)
        return student, lambda: script.finetune(student, teacher, rows, minutes=1, steps=8, lr=3e-3, saved=state)

    whole, run = trained(None)
    figures = run()
    path = tmp_path / "OUT.state"
    saved = script.Kept.save

    def break_off(state: Any, course: Any, parts: Any) -> None:
        saved(state, course, parts)
        if course.step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(script.Kept, "save", break_off)
    with pytest.raises(KeyboardInterrupt):
        trained(script.Kept(path, "a"))[1]()
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="of another training"):
        trained(script.Kept(path, "b"))[1]()
    state = script.Kept(path, "a")
    course, parts = state.load()
    resumed, run = trained(state)
    assert run() == figures
    assert all(torch.equal(resumed.state_dict()[name], t) for name, t in whole.state_dict().items())
    # The moments are part of what was learned: without them it ends elsewhere.
    state.save(course, parts | {"moments": {name: torch.zeros_like(t) for name, t in parts["moments"].items()}})
    other, run = trained(state)
    run()
    assert not torch.equal(other.layers[0].mlp.up_proj.weight, whole.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("bits", [2, 3])
def test_zero_points_are_those_of_rounding(script: ModuleType, source: Path, tmp_path: Path, bits: int) -> None:
    options = dataclasses.replace(OPTIONS, bits=bits, symmetric=False)
    script.export(script.rounded_copy(script.load_model(source), options), source, tmp_path / "begun", options)
    plain = Options(method="rtn", bits=bits, group_size=32, symmetric=False)
    quantise_checkpoint(source, tmp_path / "rtn", plain, "compressed-tensors")
    start, rtn = (weights_of(tmp_path / name) for name in ("begun", "rtn"))
    assert all(torch.equal(start[name], rtn[name]) for name in rtn)
