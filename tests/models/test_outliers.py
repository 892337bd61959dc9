"""LLM.int8() as it runs: inputs whose activations are outliers are multiplied in float, the others in int8."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_quantised import distance
from tests.support.harness import follow, load, save_random

from headrace.backends.cpu import matrix as matrices
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint
from headrace.runner.runner import Runner

CONFIG = {
    "model_type": "llama", "vocab_size": 199, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PLANTED = (5, 77)
TIMES = 100.0
TEXT = [[(5 * i * i + 7 * i + k) % 199 for i in range(60)] for k in range(4)]
IDS = [(11 * i * i + 3 * i + 1) % 199 for i in range(60)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose norms give out two inputs a hundred times as large, which the weights after them take back."""
    directory = tmp_path_factory.mktemp("planted")
    save_random(CONFIG, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, weight in tensors.items():
        if "layernorm" in name:
            weight[list(PLANTED)] = weight[list(PLANTED)].abs().clamp_min(0.5) * TIMES
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            weight[:, list(PLANTED)] /= TIMES
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def checkpoints(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {}
    for method, layout in (("rtn", "compressed-tensors"), ("llm_int8", "bitsandbytes")):
        result[method] = tmp_path_factory.mktemp(method)
        quantise_checkpoint(planted, result[method], Options(method=method, bits=8, group_size=-1), layout, TEXT)
    return result


def logits(directory: Path, sizes: list[int] | None = None, **options: Any) -> torch.Tensor:
    return follow(load(directory, **({"dtype": "float32"} | options)), IDS, sizes or [len(IDS)])


def matrices_of(runner: Runner) -> list[Any]:
    return runner.program.model.ops.matrices  # type: ignore[attr-defined, no-any-return]


def test_it_loses_less_than_plain_int8_where_outliers_are_planted(planted: Path, checkpoints: dict[str, Path]) -> None:
    plain = logits(planted)
    naive, split = (distance(logits(checkpoints[method]), plain) for method in ("rtn", "llm_int8"))
    assert split < 0.3 * naive
    assert split < 0.08


def test_control_outliers_that_stay_in_the_row_spoil_it(
    planted: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits(planted)
    outliers = matrices._outliers

    def left_in(source: Any, pool: Any) -> Any:
        result = outliers(source, pool)
        if result is not None:
            result.back.data[:] = 0
        return result

    good = distance(logits(checkpoints["llm_int8"]), plain)
    monkeypatch.setattr(matrices, "_outliers", left_in)
    assert distance(logits(checkpoints["llm_int8"]), plain) > 3 * good


def test_both_backends_mean_the_same(checkpoints: dict[str, Path]) -> None:
    runners = [load(checkpoints["llm_int8"], dtype="float32", backend=backend) for backend in ("cpu", "torch_ref")]
    native, reference = (matrices_of(runner) for runner in runners)
    num_split = 0
    for native_row, other in zip(native, reference, strict=True):
        torch.testing.assert_close(torch.from_numpy(native_row.dense()), other.dense(), rtol=1e-6, atol=0)
        if native_row.outliers is not None:
            num_split += 1
            assert native_row.kind == "i8"
            if "q_proj" in native_row.name or "gate_proj" in native_row.name:
                assert set(native_row.outliers.columns.tolist()) >= set(PLANTED)
    assert num_split >= 4
    actual, expected = (follow(runner, IDS, [len(IDS)]) for runner in runners)
    assert distance(actual, expected) < 0.08


def test_I_13_chunks_do_not_change_the_bits(checkpoints: dict[str, Path]) -> None:
    whole = logits(checkpoints["llm_int8"])
    assert torch.equal(logits(checkpoints["llm_int8"], [1, 7, 2, 50]), whole)
    assert torch.equal(logits(checkpoints["llm_int8"], num_threads=1), whole)


def test_the_load_says_so(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        load(checkpoints["llm_int8"], dtype="float32", save_packed=True)
    assert "int8-channel kernels with outliers in 16 bits" in caplog.text
    assert "has outliers, which a packed file has no place for" in caplog.text
    assert not list(checkpoints["llm_int8"].glob("*.packed*"))


def test_parts_with_other_outliers_are_parts_of_their_own(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As somebody else might write them."""
    directory = tmp_path / "changed"
    directory.mkdir()
    for path in checkpoints["llm_int8"].iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    name = "model.layers.0.self_attn.k_proj"
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if f"{name}.outlier_columns" in tensors:
            tensors[f"{name}.outlier_columns"] = tensors[f"{name}.outlier_columns"][:-1].clone()
            tensors[f"{name}.outlier_weight"] = tensors[f"{name}.outlier_weight"][:, :-1].contiguous()
            save_file(tensors, path)
    runner = load(directory, dtype="float32", activations="16bit")
    [stack] = [
        matrice
        for matrice in matrices_of(runner)
        if name.rpartition(".")[0] in matrice.name and "k_proj" in matrice.name
    ]
    assert [len(part.outliers.columns) for part in stack.parts] == [2, 1, 2]
    # Where nothing of the activations is rounded, both backends mean the same but for the order of sums.
    assert distance(follow(runner, IDS, [len(IDS)]), logits(directory, backend="torch_ref")) < 1e-4
