"""`headrace quantize --method qat` on a tiny model: it begins where rounding to nearest ends, and loses less after."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.commands import run_command

from headrace.backends.torch_ref.tensors import tensor
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quantize import training
from headrace.quantize.base import Options, find_method
from headrace.quantize.driver import REPORT, QuantizeRun, _File, quantise_checkpoint
from headrace.quantize.state import STATE
from headrace.quantize.writers import compressed_tensors

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OPTIONS = Options(method="qat", bits=3, group_size=32, num_steps=20, learning_rate=6e-3)
TEXT = [torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(24)]


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of sixteen rows of 32 tokens, which take milliseconds."""
    monkeypatch.setattr(training, "LENGTH", 32)
    monkeypatch.setattr(training, "STEP_TOKENS", 512)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model_of(tmp_path / "model")


def model_of(path: Path, tied: bool = True, **changes: Any) -> Path:
    torch.manual_seed(0)
    tensors = {name: 2 * t if t.dim() == 2 else t for name, t in llama_tensors(CONFIG, torch.bfloat16).items()}
    if tied:
        tensors.pop("lm_head.weight", None)
    output = {"tie_word_embeddings": tied, "torch_dtype": "bfloat16", "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    return write_llama(path, tensors, **(CONFIG | output | changes))


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The quantised layers, as the reader has them."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    weights = {}
    for path in directory.glob("*.safetensors"):
        file = _File(path)
        for name in [name.removesuffix("_packed") for name in file._file.entries if name.endswith(".weight_packed")]:
            codes = compressed_tensors.read(file, name.removesuffix(".weight"), config)
            weights[name] = tensor(codes.dequantize())
    return weights


def is_same(one: Path, other: Path) -> bool:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tied", [True, False])
def test_it_loses_less_than_rounding_and_without_steps_it_is_rounding(tmp_path: Path, tied: bool) -> None:
    source = model_of(tmp_path / "model", tied)
    runs = {
        "trained": OPTIONS,
        "begun": dataclasses.replace(OPTIONS, num_steps=0),
        "rtn": dataclasses.replace(OPTIONS, method="rtn"),
    }
    if tied:
        runs |= {"again": OPTIONS, "seed": dataclasses.replace(OPTIONS, seed=1)}
    for name, options in runs.items():
        report = quantise_checkpoint(source, tmp_path / name, options, "compressed-tensors", TEXT)
        assert not (tmp_path / name / STATE).exists()
        assert not (tmp_path / name / training.FILE).exists()
        if name == "trained":
            assert report.kl is not None
            before, after = report.kl
            assert after < 0.9 * before
            assert json.loads((tmp_path / name / REPORT).read_text())["kl"] == [before, after]
        if name == "begun":
            assert report.kl == (before, before)
    # The negative control: no steps are no gain, and the bits of rounding to nearest.
    assert is_same(tmp_path / "begun", tmp_path / "rtn")
    assert not is_same(tmp_path / "trained", tmp_path / "rtn")
    if tied:
        # The same seed gives the same bytes, and another one others.
        assert is_same(tmp_path / "trained", tmp_path / "again")
        assert not is_same(tmp_path / "trained", tmp_path / "seed")
        assert kl_of(source, tmp_path / "trained") == pytest.approx(after, rel=1e-3)
        assert kl_of(source, tmp_path / "rtn") == pytest.approx(before, rel=1e-3)


def kl_of(source: Path, directory: Path) -> float:
    """Nats a token on the rows that are held out, of the weights that are read back, with the rest as it was."""
    run = QuantizeRun(source, Path(), OPTIONS, "compressed-tensors", None, None)
    stored = training.Source(lambda name: tensor(run.checkpoint.array(name)), run.checkpoint.names, run.values)
    teacher, student = (training.load_model(stored) for _ in range(2))
    state = student.state_dict()
    student.load_state_dict({name: weights_of(directory).get(f"model.{name}", t) for name, t in state.items()})
    rows = training.rows_of(TEXT)
    with torch.no_grad():
        return float(training.divergence(student, teacher, rows[: min(training.HELD_OUT, len(rows) // 2)]))


def test_gradients_go_past_the_rounding() -> None:
    options = find_method("qat").verify(OPTIONS)
    layer = training.RoundedLinear(torch.nn.Linear(32, 4, bias=False), options, "a")
    layer(torch.randn(5, 32)).square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.log_scale.grad is not None
    assert float(layer.weight.grad.abs().sum()) > 0
    assert float(layer.log_scale.grad.abs().sum()) > 0


def test_training_goes_on_where_it_was_broken_off(source: Path, tmp_path: Path) -> None:
    """The weights of a run that was killed at its half, and resumed, are those of one that never stopped."""
    layout = "compressed-tensors"
    whole = quantise_checkpoint(source, tmp_path / "whole", OPTIONS, layout, TEXT)
    saved = training.StateFile.save
    out = tmp_path / "out"

    def break_off(state_file: Any, course: Any, parts: Any) -> None:
        saved(state_file, course, parts)
        if course.step == 10:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.StateFile, "save", break_off)
        with pytest.raises(KeyboardInterrupt):
            quantise_checkpoint(source, out, OPTIONS, layout, TEXT)
    with pytest.raises(RequestError, match="a run with other options"):
        quantise_checkpoint(source, out, dataclasses.replace(OPTIONS, num_steps=21), layout, TEXT)
    stored = (out / training.FILE).read_bytes()
    steps: list[int] = []
    run = QuantizeRun(source, out, OPTIONS, layout, TEXT, None, lambda num_done, total, label: steps.append(num_done))
    assert run.run().kl == whole.kl
    assert steps == list(range(10, 20))
    assert is_same(out, tmp_path / "whole")
    # The moments are part of what was learned: without them it ends elsewhere.
    (tmp_path / "state").write_bytes(stored)
    state_file = training.StateFile(tmp_path / "state", run.state.fingerprint)
    course, parts = state_file.load() or (None, {})
    assert course is not None
    state_file.save(course, parts | {"moments": {name: torch.zeros_like(t) for name, t in parts["moments"].items()}})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / STATE).write_text(
        json.dumps({"fingerprint": run.state.fingerprint, "files": {}, "errors": {}})
    )
    (tmp_path / "state").rename(tmp_path / "other" / training.FILE)
    quantise_checkpoint(source, tmp_path / "other", OPTIONS, layout, TEXT)
    assert not is_same(tmp_path / "other", tmp_path / "whole")


def test_the_state_of_another_training_is_refused(tmp_path: Path) -> None:
    training.StateFile(tmp_path / "state", "a").save(training.Course(), {"best": {"x": torch.zeros(1)}})
    assert training.StateFile(tmp_path / "state", "a").load() is not None
    with pytest.raises(CheckpointError, match="of another training"):
        training.StateFile(tmp_path / "state", "b").load()


@pytest.mark.parametrize("bits", [2, 3])
def test_zero_points_are_those_of_rounding(source: Path, tmp_path: Path, bits: int) -> None:
    options = dataclasses.replace(OPTIONS, bits=bits, symmetric=False, num_steps=0)
    for method in ("qat", "rtn"):
        quantise_checkpoint(
            source, tmp_path / method, dataclasses.replace(options, method=method), "compressed-tensors", TEXT
        )
    assert is_same(tmp_path / "qat", tmp_path / "rtn")


def test_models_that_are_no_plain_llama_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their type, by their tensors, by what they compute, and by their size."""

    def refused(source: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            quantise_checkpoint(source, tmp_path / f"out-{source.name}", OPTIONS, "compressed-tensors", TEXT)

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    refused(model_of(tmp_path / "yarn", rope_scaling=yarn), "computes otherwise than a plain Llama")
    assert training.MODEL_TYPES == ("llama", "mistral")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "MODEL_TYPES", ("mistral",))
        refused(model_of(tmp_path / "type"), "model_type is 'llama', expected one of mistral")
    monkeypatch.setattr(training, "MOMENTS", 10**12)
    refused(model_of(tmp_path / "large"), "GB of memory for this model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"num_steps": -1}, "num_steps"), ({"learning_rate": -1.0}, "learning_rate"), ({"bits": 5}, "bits")],
)
def test_wrong_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_method("qat").verify(dataclasses.replace(OPTIONS, **fields))
    with pytest.raises(RequestError, match="calibration"):
        training.rows_of([[1, 2, 3, 4, 5, 6, 7]])


def test_the_command_prints_the_gain(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in TEXT))
    words = ("--method", "qat", "--bits", "3", "--calibration", str(tmp_path / "text.jsonl"))
    steps = ("--num-steps", "20", "--learning-rate", "0.003", "--calibration-length", "64")
    monkeypatch.setattr("headrace.engine.progress.LOG_INTERVAL_S", 0.0)
    code, _, err = run_command(monkeypatch, capsys, "quantize", str(source), str(tmp_path / "out"), *words, *steps)
    assert code == 0, err
    assert "mnats a token from the model when rounded to nearest" in err
    assert "% less)" in err
    assert re.search(r"steps of training: 10 of 20 \(50 %\), .* left at this rate, .* mnats", err)


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_scale_for_a_layer_stays_one(symmetric: bool) -> None:
    """What layouts with a scale for the whole tensor can hold."""
    torch.manual_seed(0)
    options = find_method("qat").verify(Options(method="qat", bits=4, group_size=0, symmetric=symmetric))
    layer = training.RoundedLinear(torch.nn.Linear(8, 4, bias=False), options, "x")
    before = layer.codes().scales
    layer(torch.randn(5, 8)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    after = layer.codes().scales
    assert after.shape == before.shape == (4, 1)
    assert len(after.unique()) == 1
    assert after[0, 0] != before[0, 0]
