"""Groups of weights that the inspector shows, of plain and quantised files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.protocol.errors import RequestError
from headrace.quantize import samples

NAME = "model.layers.0.self_attn.q_proj"


def write_gptq(directory: Path) -> np.ndarray:
    """Write a matrix [8, 256] in the layout of GPTQ, and return what it stands for."""
    random = np.random.default_rng(3)
    codes, scales = random.integers(0, 16, (256, 8)), random.random((2, 8)).astype(np.float16)
    shifts = 4 * np.arange(8)
    words = (codes.reshape(32, 8, 8) << shifts[:, None]).sum(1)
    # Zeros are stored less one: 7 stands for 8.
    zeros = np.full((2, 1), sum(7 << shift for shift in shifts))
    groups = np.arange(256) // 128
    tensors = {"qweight": words, "qzeros": zeros, "g_idx": groups}
    parts = {name: (value % 2**32).astype(np.uint32).view(np.int32) for name, value in tensors.items()}
    named = {f"{NAME}.{name}": value for name, value in (parts | {"scales": scales}).items()}
    save_file(named, directory / "model.safetensors")
    method = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": method}))
    weight: np.ndarray = ((codes - 8) * scales.astype(np.float32)[groups]).T
    return weight


def test_the_values_of_a_quantised_file_are_what_its_codes_stand_for(tmp_path: Path) -> None:
    weight = write_gptq(tmp_path)
    assert samples.names_of(tmp_path) == [NAME]
    for group in (0, 1, 5, 15):
        sample = samples.group_of(tmp_path, NAME, group)
        assert (sample["stored"], sample["is_plain"], sample["num_groups"]) == ("gptq, 4 bits", False, 16)
        row, column = sample["row"], sample["column"]
        assert (row, column) == (group // 2, group % 2 * 128)
        assert sample["values"] == weight[row, column : column + 128].tolist()


@pytest.mark.parametrize(("name", "group", "field"), [("nobody", 0, "name"), (NAME, 16, "group"), (NAME, -1, "group")])
def test_what_is_not_there_is_refused(tmp_path: Path, name: str, group: int, field: str) -> None:
    write_gptq(tmp_path)
    with pytest.raises(RequestError) as refusal:
        samples.group_of(tmp_path, name, group)
    assert refusal.value.field == field
    job = msgspec.msgpack.encode({"path": str(tmp_path), "name": name, "group": group})
    assert msgspec.msgpack.decode(samples.answer(job))["error"] == [field, refusal.value.bound]


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_a_gguf_file_has_the_weights_of_its_checkpoint(shared_data: Path, kind: str) -> None:
    folder = shared_data / "models"
    exact = MappedCheckpoint(folder / "TinyStories-656K").array("model.layers.1.self_attn.o_proj.weight")
    path = folder / "derived" / "gguf" / f"TinyStories-656K.{kind}.gguf"
    sample = samples.group_of(path, "blk.1.attn_output", 3)
    assert (sample["stored"], sample["is_plain"]) == (kind, kind in ("F32", "BF16"))
    row, column = sample["row"], sample["column"]
    values = np.array(sample["values"])
    error = np.abs(values - exact[row, column : column + len(values)]).max() / np.abs(exact[row]).max()
    bound = {"F32": 0.0, "BF16": 2**-8, "Q8_0": 1 / 127, "Q4_0": 1 / 8}[kind]
    assert error <= bound
    assert kind in ("F32", "BF16") or error > 0


def test_a_path_without_weights_is_an_error_in_words(tmp_path: Path) -> None:
    reply = msgspec.msgpack.decode(samples.answer(msgspec.msgpack.encode({"path": str(tmp_path)})))
    assert "no *.safetensors" in reply["error"][1]


def test_the_machine_reads_and_computes() -> None:
    limits = samples.limits_of_machine(num_bytes=2**16, seconds=1e-4)
    assert limits["bandwidth"] > 0
    assert all(rate > 0 for rate in limits["peaks"].values())
