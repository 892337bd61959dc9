"""Matrices of several forms, and of inputs in another order: the same weights and logits everywhere, and packed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.stored import make_plain
from tests.backends.test_verify import planted, step
from tests.formats.packed.test_packed import rewritten
from tests.models.test_quantised import distance, matrices
from tests.support.harness import follow, load, save_random
from tests.support.stored import V, mixed

from headrace import models
from headrace.backends.cpu.check.verify import verify
from headrace.backends.cpu.matrix import CpuMatrix
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import Scheme
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint

IDS = [(11 * i * i + 3 * i + 1) % 2048 for i in range(60)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "backend": "cpu"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    return mixed(make_plain(folder / "plain"), folder / "mixed")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_each_part_has_its_own_form(stored: Path) -> None:
    runner: Any = load(stored, **OPTIONS)
    q, k, v = next(matrix for matrix in runner.program.model.ops.matrices if "q_proj" in matrix.name).parts
    assert (q.kind, k.kind, v.kind) == ("i8", "i8", "f")
    assert q.scheme.has_min
    assert not np.array_equal(q.permutation, k.permutation)
    assert v.permutation is None
    assert "permute" in {node.op for node in runner.program.tape.nodes}


@pytest.mark.parametrize("activations", ["int8", "16bit"])
def test_both_backends_mean_the_same(stored: Path, activations: str) -> None:
    native, reference = (
        load(stored, activations=activations, **OPTIONS),
        load(stored, backend="torch_ref", dtype="float32"),
    )
    pairs = zip(*(matrices(runner.program.model) for runner in (native, reference)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    expected = follow(reference, IDS, [len(IDS)])
    actual = follow(native, IDS, [len(IDS)])
    assert distance(actual, expected) < (1e-5 if activations == "16bit" else 0.05)
    assert torch.equal(follow(native, IDS, [1, 9, 2, 48]), actual)


def test_a_backend_without_parts_holds_them_widened_and_says_so(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        widened = load(stored, backend="cuda", device="cpu", dtype="bfloat16")
    assert "act-order" in caplog.text
    assert " times as much" in caplog.text
    expected = follow(load(stored, backend="torch_ref", dtype="float32"), IDS, [len(IDS)])
    assert distance(follow(widened, IDS, [len(IDS)]), expected) < 0.05


@pytest.mark.parametrize("activations", ["int8", "16bit"])
def test_every_record_agrees_with_torch_ref(stored: Path, activations: str) -> None:
    program: Any = load(stored, activations=activations, **OPTIONS).program
    assert verify(program.tape, step(program)) == []


def test_control_another_order_of_inputs_is_noticed(stored: Path) -> None:
    program: Any = load(stored, **OPTIONS).program
    node = next(node for node in program.tape.nodes if node.op == "permute")
    assert planted(program, node, "columns", node.fields["columns"][::-1].copy())[0].op == "permute"


@pytest.mark.usefixtures("home")
def test_packed_files_hold_them(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = follow(load(stored, save_packed=True, **OPTIONS), IDS, [len(IDS)])
    [path] = stored.glob("*.packed")
    try:
        with caplog.at_level(logging.WARNING, "headrace"):
            assert torch.equal(follow(load(stored, **OPTIONS), IDS, [len(IDS)]), expected)
        assert not caplog.text
        whole = path.read_bytes()

        def shape(header: dict[str, Any], _: Any) -> None:
            """Say that the order of the inputs is of another type."""
            name = next(name for name in header if name.startswith("permutation/"))
            header[name] |= {"dtype": "F32"}

        rewritten(path, shape)
        with caplog.at_level(logging.WARNING, "headrace"):
            load(stored, **OPTIONS)
        assert "expected I32 [256]" in caplog.text
        path.write_bytes(whole)
    finally:
        path.unlink()


def test_the_order_in_a_packed_file_must_be_one(stored: Path) -> None:
    for order in ([0, 1, 1, 3], [0, 1, 2, 4], [0, 1, 2]):
        with pytest.raises(CheckpointError, match="each once"):
            CpuMatrix(
                V, Scheme("f", dtype="float32"), np.zeros(64, np.uint8), 4, 1, permutation=np.array(order, np.int32)
            )


@pytest.mark.parametrize("activations", ["int8", "16bit"])
def test_experts_have_orders_of_their_own(tmp_path: Path, activations: str) -> None:
    config = models.find("mixtral").TINY
    save_random(config, tmp_path / "plain")
    options = Options(method="gptq", group_size=16, act_order="group")
    text = [[(7 * i * i + 3 * i + k) % config["vocab_size"] for i in range(40)] for k in range(4)]
    quantise_checkpoint(tmp_path / "plain", tmp_path / "out", options, "gptq", text)
    runner: Any = load(tmp_path / "out", activations=activations, **OPTIONS)
    assert verify(runner.program.tape, step(runner.program)) == []
    nodes = [node.fields for node in runner.program.tape.nodes if node.op == "permute"]
    orders = [fields["columns"] for fields in nodes if fields["count"] > 1]
    assert any(len({tuple(row) for row in order.reshape(config["num_local_experts"], -1)}) > 1 for order in orders)
    ids = text[0]
    expected = follow(load(tmp_path / "out", backend="torch_ref", dtype="float32"), ids, [len(ids)])
    assert distance(follow(runner, ids, [1, 9, 30]), expected) < (1e-5 if activations == "16bit" else 0.1)
