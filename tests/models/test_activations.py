"""`--activations`: what quantised weights are multiplied with, chosen by what is measured when the model is loaded."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.outliers import store_llm_int8
from safetensors.torch import load_file, save_file
from tests.models.test_quantised import TEXT, distance
from tests.support.harness import follow, load, save_random

from headrace import hub
from headrace.backends.cpu.losses import activations
from headrace.backends.cpu.losses.saved import SavedLosses, build
from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant import flips
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint
from headrace.text.tokenizer import Tokenizer

CONFIG = {
    "model_type": "llama", "vocab_size": 199, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PLANTED = [5, 77, 100]
TIMES = 64.0
IDS = [(11 * i * i + 3 * i + 1) % 199 for i in range(40)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    save_random(CONFIG, directory)
    return directory


@pytest.fixture(scope="module")
def planted(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same function: norms give out three inputs 64 times as large, which the weights after them take back."""
    directory = tmp_path_factory.mktemp("planted")
    for path in plain.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    tensors = load_file(plain / "model.safetensors")
    for name, weight in tensors.items():
        if "layernorm" in name:
            weight[PLANTED] *= TIMES
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            weight[:, PLANTED] /= TIMES
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits(directory: Path, sizes: list[int] | None = None, **options: Any) -> torch.Tensor:
    return follow(load(directory, **({"dtype": "float32"} | options)), IDS, sizes or [len(IDS)])


def wide_of(directory: Path, **options: Any) -> tuple[set[str], str]:
    runner, info = build_runner(EngineConfig(model=str(directory), dtype="float32", **options))
    ops: Any = runner.program.model.ops  # type: ignore[attr-defined]
    return {matrix.name.rpartition(".")[2] for matrix in ops.wide}, info.activations


def test_auto_takes_floats_where_outliers_are_and_int8_elsewhere(plain: Path, planted: Path) -> None:
    assert wide_of(plain, quantization="int8") == (set(), "int8")
    wide, form = wide_of(planted, quantization="int8")
    assert (wide, form) == ({"q_proj+k_proj+v_proj", "gate_proj+up_proj"}, "mixed")


@pytest.mark.parametrize("quantization", ["int8", "int4-g64"])
def test_the_loss_of_planted_outliers_is_that_of_the_weights(plain: Path, planted: Path, quantization: str) -> None:
    expected = logits(planted)
    weights_alone = distance(logits(planted, quantization=quantization, backend="torch_ref"), expected)
    wide, auto, narrow = (
        distance(logits(planted, quantization=quantization, activations=mode), expected)
        for mode in ("16bit", "auto", "int8")
    )
    assert wide == pytest.approx(weights_alone, rel=1e-3)
    assert auto < 1.2 * weights_alone + 0.01
    assert narrow > 1.1 * auto


def test_control_without_the_measurement_outliers_spoil_it(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = distance(logits(planted, quantization="int8"), logits(planted))
    monkeypatch.setattr(activations, "measure", lambda *args: activations.Measured({}, set()))
    assert distance(logits(planted, quantization="int8"), logits(planted)) > 1.3 * good


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A mark for each time that something is measured."""
    marks: list[str] = []
    measure = activations.measure
    monkeypatch.setattr(activations, "measure", lambda *args: marks.append("measured") or measure(*args))
    return marks


def copied(directory: Path, target: Path) -> Path:
    return Path(shutil.copytree(directory, target / "model"))


def test_beside_a_packed_file_the_measurement_is_kept(planted: Path, tmp_path: Path, measuring: list[str]) -> None:
    path = copied(planted, tmp_path)
    chosen = wide_of(path, quantization="int8", save_packed=True)
    (measurement,) = path.glob("*.packed.measured")
    assert wide_of(path, quantization="int8") == chosen
    assert measuring == ["measured"]
    assert chosen[1] == "mixed"
    # The choice is what the file says.
    values = json.loads(measurement.read_text())
    saved = SavedLosses(measurement, values["max_model_len"], may_write=True)
    saved.write(values["text"], dict.fromkeys(values["losses"], 0.0), values["noisy"])
    assert wide_of(path, quantization="int8") == (set(), "int8")
    assert measuring == ["measured"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"build": "another", "max_model_len": 256, "text": "TEXT", "losses": {}}', '{"losses": {}}',
     '{"build": "BUILD", "max_model_len": 256, "text": "TEXT", "losses": {"a": 1}, "noisy": []}',
     '{"build": "BUILD", "max_model_len": 256, "text": "TEXT", "losses": {"a": "b"}, "noisy": []}',
     '{"build": "BUILD", "max_model_len": 256, "text": "TEXT", "losses": {}}',
     '{"build": "BUILD", "max_model_len": 256, "text": "TEXT", "losses": LOSSES, "noisy": ["a"]}',
     '{"build": "BUILD", "max_model_len": 256, "text": "another", "losses": LOSSES, "noisy": []}'],
)  # fmt: skip
def test_what_another_build_measured_or_is_damaged_is_measured_again(
    text: str, planted: Path, tmp_path: Path, measuring: list[str]
) -> None:
    path = copied(planted, tmp_path)
    chosen = wide_of(path, quantization="int8", save_packed=True)
    (measurement,) = path.glob("*.packed.measured")
    before = measurement.read_text()
    values = json.loads(before)
    text = text.replace("BUILD", build()).replace("TEXT", values["text"])
    measurement.write_text(text.replace("LOSSES", json.dumps(values["losses"])))
    assert wide_of(path, quantization="int8") == chosen
    assert measuring == ["measured"] * 2
    assert measurement.read_text() != before  # a start without --save-packed writes nothing
    assert wide_of(path, quantization="int8", save_packed=True) == chosen
    assert measurement.read_text() == before


def test_another_context_is_measured_for_itself(planted: Path, tmp_path: Path, measuring: list[str]) -> None:
    """Rotary frequencies may depend on it, and the choice must not depend on an earlier start."""
    path = copied(planted, tmp_path)
    wide_of(path, quantization="int8", save_packed=True)
    wide_of(path, quantization="int8", max_model_len=128)
    assert measuring == ["measured"] * 2


def test_without_a_packed_file_nothing_is_kept(planted: Path, tmp_path: Path, measuring: list[str]) -> None:
    path = copied(planted, tmp_path)
    for _ in range(2):
        wide_of(path, quantization="int8")
    assert measuring == ["measured"] * 2
    assert not list(path.glob("*.measured"))


@pytest.fixture(scope="module")
def of_builtin() -> dict[str, Any]:
    """What the sample says of the built-in model, and its logits on other text, by activations."""
    ids = Tokenizer.load(hub.resolve("builtin")).encode(TEXT)
    runners = {
        mode: load("builtin", dtype="float32", quantization="int8", activations=mode)
        for mode in ("int8", "auto", "16bit")
    }
    ops: Any = runners["auto"].program.model.ops  # type: ignore[attr-defined]
    return {"ops": ops} | {mode: follow(runner, ids, [len(ids)]) for mode, runner in runners.items()}


def test_the_sample_s_own_noise_sends_some_matrices_to_floats(of_builtin: dict[str, Any]) -> None:
    """On a text that the choice has not seen, most of what int8 changes is gone, for a part of the matrices."""
    assert 0 < len(of_builtin["ops"].wide) < len(of_builtin["ops"].matrices)
    narrow, auto = (distance(of_builtin[mode], of_builtin["16bit"]) for mode in ("int8", "auto"))
    assert 0 < auto < 0.7 * narrow


@pytest.mark.parametrize(("most", "expected"), [(1.0, 0), (0.0, "all")])
def test_control_the_bound_decides(most: float, expected: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "MAX_RATE", most)
    runner: Any = load("builtin", dtype="float32", quantization="int8")
    ops = runner.program.model.ops
    assert len(ops.wide) == (len(ops.matrices) if expected == "all" else expected)


def test_the_choice_by_a_sample_does_not_depend_on_threads(of_builtin: dict[str, Any]) -> None:
    runner: Any = load("builtin", dtype="float32", quantization="int8", num_threads=1)
    assert names_of(runner.program.model.ops) == names_of(of_builtin["ops"])


def names_of(ops: Any) -> set[str]:
    return {matrix.name for matrix in ops.wide}


def test_a_sample_s_choice_is_kept_beside_a_packed_file(
    tmp_path: Path, measuring: list[str], of_builtin: dict[str, Any]
) -> None:
    shutil.copytree(hub.resolve("builtin"), tmp_path / "model")

    def chosen(**options: Any) -> set[str]:
        return names_of(load(tmp_path / "model", dtype="float32", quantization="int8", **options).program.model.ops)  # type: ignore[attr-defined]

    assert chosen(save_packed=True) == chosen() == names_of(of_builtin["ops"])
    assert measuring == ["measured"]
    # Another template makes other tokens of the sample.
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chosen()
    assert measuring == ["measured"] * 2


@pytest.mark.parametrize("mode", ["auto", "16bit"])
def test_I_13_chunks_and_threads_do_not_change_the_bits(planted: Path, mode: str) -> None:
    options = {"quantization": "int4", "activations": mode}
    whole = logits(planted, num_threads=2, **options)
    assert torch.equal(logits(planted, [1, 7, 2, 30], num_threads=1, **options), whole)


def test_16bit_is_the_reference_s_arithmetic(plain: Path) -> None:
    result = logits(plain, quantization="int8", activations="16bit")
    assert distance(result, logits(plain, quantization="int8", backend="torch_ref")) < 2e-5


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headrace import models

    directory = tmp_path_factory.mktemp("experts")
    save_random(models.find("mixtral").TINY, directory)
    return directory


def test_experts(experts: Path) -> None:
    ids = [i % 100 for i in IDS]
    wide, reference = (
        follow(load(experts, dtype="float32", quantization="int8", **more), ids, [len(ids)])
        for more in ({"activations": "16bit"}, {"backend": "torch_ref"})
    )
    assert distance(wide, reference) < 2e-5
    assert wide_of(experts, quantization="int8")[1] in ("int8", "mixed")


@pytest.mark.parametrize("model", ["plain", "experts"])
def test_a_table_that_int8_does_not_hold_takes_floats(model: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(model)
    ids = [i % 100 for i in IDS]
    result, rounded, reference = (
        follow(load(directory, dtype="float32", quantization="nf4", **more), ids, [len(ids)])
        for more in ({}, {"activations": "int8"}, {"backend": "torch_ref"})
    )
    assert distance(result, reference) < 2e-5, "NF4's levels are exact"
    assert 1e-3 < distance(rounded, reference) < 0.3, "asked for, int8 rounds them and the activations"
    assert wide_of(directory, quantization="nf4")[1] == "16bit"
    assert wide_of(directory, quantization="mxfp4")[1] in ("int8", "mixed"), "twice E2M1's numbers are whole"


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"activations": "int8"}, "no weights of integer codes"),
        ({"activations": "16bit"}, "not quantised"),
        ({"activations": "int8", "quantization": "int8", "backend": "torch_ref"}, "auto or 16bit"),
    ],
)
def test_a_choice_that_can_not_be_made_is_refused(plain: Path, options: dict[str, str], bound: str) -> None:
    with pytest.raises(RequestError, match=bound) as error:
        build_runner(EngineConfig(model=str(plain), **options))
    assert error.value.field == "activations"


@pytest.fixture
def stored(plain: Path, tmp_path: Path) -> Path:
    return store_llm_int8(plain, tmp_path / "llm-int8")


def with_threshold(directory: Path, threshold: Any) -> Path:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = threshold
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_llm_int8_of_bitsandbytes_has_no_outlier_in_int8(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert wide_of(stored)[1] == "16bit"
    assert "has outliers in 16 bits: all activations stay so" in caplog.text
    assert torch.equal(logits(stored), logits(stored, activations="16bit"))
    # Where it is asked for, or the method has no outliers, it is int8 like any other.
    assert wide_of(stored, activations="int8") == (set(), "int8")
    assert wide_of(with_threshold(stored, 0.0)) == (set(), "int8")


@pytest.mark.parametrize("threshold", [-1, math.nan, True, "6", [6.0]])
def test_a_threshold_that_is_none(stored: Path, threshold: Any) -> None:
    with pytest.raises(CheckpointError, match="llm_int8_threshold"):
        wide_of(with_threshold(stored, threshold))


@pytest.mark.parametrize("bits", [2, 3])
def test_I_13_codes_of_two_and_three_bits(bits: int, plain: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    quantise_checkpoint(plain, directory, Options("rtn", bits, 64, symmetric=False), "gptq")
    whole = logits(directory, num_threads=2)
    assert torch.equal(logits(directory, [1, 7, 2, 30], num_threads=1), whole)
    assert distance(whole, logits(directory, backend="torch_ref")) < 2e-5
    runner, info = build_runner(EngineConfig(model=str(directory), dtype="float32"))
    ops: Any = runner.program.model.ops  # type: ignore[attr-defined]
    small = [matrix for matrix in ops.matrices if matrix.kind == f"i{bits}"]
    assert len(small) >= 4
    assert info.activations == "16bit"
    for matrix in small:
        # Scales of 16 bits and zeros of 4 for the file's zeros of 2 or 3; padding of outputs apart.
        stored = (bits + (16 + bits) / 64) * matrix.num_in * -(-matrix.num_out // 32) * 32 / 8
        assert matrix.num_bytes <= 1.05 * stored
