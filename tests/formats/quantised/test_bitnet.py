"""BitNet's checkpoints beside transformers' own layers, whose forward passes round the inputs of each row to int8.

transformers loads such a checkpoint with `accelerate` only, so its layers are put into its model by hand."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.harness import BACKENDS, follow, load, random_ids, save_random

from headrace import models
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import Scheme

CONFIG = models.find("bitnet").TINY | {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 256}
FORMS: dict[str, dict[str, Any]] = {
    "bitlinear": {},
    "autobitlinear": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
IDS = random_ids(40, CONFIG["vocab_size"], 1)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' layers, whose functions are compiled; that takes seconds and changes nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function: function)
        return importlib.import_module("transformers.integrations.bitnet")


def ternary(
    theirs: Any, module: torch.nn.Linear, form: str, stem: str, tensors: dict[str, torch.Tensor]
) -> torch.nn.Module:
    """transformers' layer of a plain one, and its tensors."""
    weight, (num_out, num_in) = module.weight.detach(), module.weight.shape
    if form == "online":
        layer: Any = theirs.AutoBitLinear(num_in, num_out, bias=False, online_quant=True)
        layer.weight.data = tensors[f"{stem}.weight"] = weight.clone()
        return layer
    mean = weight.abs().mean().bfloat16().float()
    numbers = (weight / mean).round().clamp(-1, 1)
    if form == "bitlinear":
        layer = theirs.BitLinear(num_in, num_out, bias=False, dtype=torch.float32)
        layer.weight, scale = theirs.pack_weights(numbers.clone()), (1 / mean).bfloat16().float()
    else:
        layer = theirs.AutoBitLinear(num_in, num_out, bias=False)
        layer.weight.data, scale = numbers, mean
    layer.weight_scale = scale.reshape(1)
    tensors |= {f"{stem}.weight": theirs.pack_weights(numbers.clone()), f"{stem}.weight_scale": scale.reshape(1)}
    return layer


def write(theirs: Any, directory: Path, form: str) -> Any:
    """A checkpoint of a form, and transformers' model of it."""
    model = save_random(CONFIG, directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, ternary(theirs, module, form, name, tensors))
        elif hasattr(module, "weight") and name != "lm_head":
            tensors[f"{name}.weight"] = module.weight.detach().clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", **FORMS[form]}
    (directory / "config.json").write_text(json.dumps(config))
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def kl(expected: torch.Tensor, actual: torch.Tensor) -> float:
    p, q = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("form", FORMS)
def test_ternary_layers_are_those_of_transformers_but_for_its_rounding_of_inputs(
    form: str, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(theirs, tmp_path, form)
    rounded = logits_of(model)
    monkeypatch.setattr(theirs.ActQuant, "apply", lambda x: x)
    monkeypatch.setattr(theirs.BitLinear, "activation_quant", lambda self, x: (x, torch.ones(*x.shape[:-1], 1)))
    exact = logits_of(model)
    assert exact.std() > 0.3
    for backend in BACKENDS:
        with caplog.at_level(logging.INFO, logger="headrace"):
            runner = load(tmp_path, backend=backend, dtype="float32")
        actual = follow(runner, IDS, [24, *([1] * 16)])
        # The scale, or one over it, is rounded to float16.
        assert (actual - exact).abs().max() < (1e-4 if form == "autobitlinear" else 0.02), backend
        assert torch.equal(actual.argmax(-1), exact.argmax(-1)), backend
        assert kl(rounded, actual) < 0.02, backend
        if backend == "cpu":
            matrices: Any = runner.program.model.ops.matrices
            schemes = {part.scheme for matrix in matrices for part in getattr(matrix, "parts", [matrix])}
            assert schemes == {Scheme("i2", 128), Scheme("f", dtype="float32")}, "all but the head"
            assert "rounds activations to int8, with a scale for each row; here they stay in 16 bits" in caplog.text
    assert kl(rounded, exact) > 1e-6, "the control: the method's rounding is seen"


def test_settings_that_are_not_read_are_refused(theirs: Any, tmp_path: Path) -> None:
    write(theirs, tmp_path, "bitlinear")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for settings, words in (
        ({"use_rms_norm": True}, "use_rms_norm is true: a norm before each layer is not supported"),
        ({"linear_class": "other"}, "linear_class is 'other', expected bitlinear or autobitlinear"),
        ({"linear_class": "autobitlinear", "quantization_mode": "x"}, "quantization_mode is 'x', expected offline or"),
    ):
        path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | settings}))
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path, backend="cpu")
