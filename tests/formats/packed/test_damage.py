"""Damaged packed files: a changed bit anywhere is noticed, and the weights come from the checkpoint instead."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.formats.packed.test_packed import model_of, native, rewritten  # noqa: F401
from tests.support.checkpoints import CONFIG, llama_tensors, write_llama
from tests.support.packing import ToyBackend, form_of, found, leaves, save, tiny

from headrace.backends.cpu.losses.saved import SavedLosses
from headrace.checkpoint import packed, source
from headrace.checkpoint.mapped import MappedCheckpoint, MappedFile
from headrace.checkpoint.packed import PackedFile, damage_of
from headrace.engine.fingerprint import fingerprint_of
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError
from headrace.protocol.step import EngineInfo


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a test goes to the real cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def undamaged(directory: Path, copied: bool) -> None:
    """Open the packed file and verify it. Raises `CheckpointError`."""
    file = found(directory)
    if file is None:
        raise CheckpointError("it is not used")
    if copied:
        file.read(lambda size: np.zeros(size, np.uint8))
    file.verify()


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_a_changed_bit_of_any_tensor_is_noticed_by_name(model_type: str, copied: bool, tmp_path: Path) -> None:
    directory = tiny(tmp_path, model_type)
    path = save(directory)
    entries = MappedFile(path).entries
    assert {name.partition("/")[0] for name in entries} >= {"matrix", "bias", "tensor", "pad", "digest"}
    undamaged(directory, copied)
    for name, entry in entries.items():
        if entry.begin == entry.end:
            continue
        for at in (entry.begin, (entry.begin + entry.end) // 2, entry.end - 1):
            flip(path, at)
            words = "it is not used" if name == "digest" else f"^{name} is damaged: its CRC-32 is "
            with pytest.raises(CheckpointError, match=words.replace("+", r"\+")):
                undamaged(directory, copied)
            flip(path, at)
    undamaged(directory, copied)


def test_control_a_file_without_a_comparison_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_llama(tmp_path)
    path = save(directory)
    flip(path, MappedFile(path).entries["tensor/model.norm.weight"].begin)
    with pytest.raises(CheckpointError, match="model.norm.weight is damaged"):
        undamaged(directory, False)
    monkeypatch.setattr(packed.zlib, "crc32", lambda data: 0)
    path.unlink()
    flip(save(directory), MappedFile(path).entries["tensor/model.norm.weight"].begin)
    undamaged(directory, False)


@pytest.mark.parametrize("sums", [None, [], [1], "x", [0.5] * 100])
def test_a_header_without_a_sum_for_each_tensor_is_refused(sums: Any, tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    path = save(directory)
    rewritten(path, lambda header, facts: facts.update(sums=sums))
    with pytest.raises(CheckpointError, match="no sum for each tensor"):
        PackedFile(path, MappedCheckpoint(directory), form_of(ToyBackend(), "int4"), ToyBackend())


def zeroes(content: bytes) -> bytes:
    return bytes(len(content))


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def longer(content: bytes) -> bytes:
    return content + b"\0"


def header(content: bytes) -> bytes:
    return content[:40] + bytes([content[40] ^ 1]) + content[41:]


def data(content: bytes) -> bytes:
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    return content[: begin + 5] + bytes([content[begin + 5] ^ 1]) + content[begin + 6 :]


def nothing(content: bytes) -> bytes:
    return b""


def older(content: bytes) -> bytes:
    """Of the version before, which had no sums."""
    import hashlib

    length = struct.unpack("<Q", content[:8])[0]
    text = content[8 : 8 + length].replace(b'\\"container\\": 3', b'\\"container\\": 2')
    return content[:8] + text + content[8 + length : -32] + hashlib.sha256(text).digest()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("damage", [zeroes, cut, longer, header, data, nothing, older])
def test_a_damaged_file_is_named_and_written_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path, llama_tensors(CONFIG, torch.bfloat16))
    first = leaves(model_of(directory, "cpu", "int4", save_packed=True))
    path = next(directory.glob("*.packed"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.INFO):
        assert leaves(model_of(directory, "cpu", "int4", save_packed=True)) == first
    assert f"{path} is not used, the weights are read from the checkpoint" in caplog.text
    assert f"the packed weights are in {path}" in caplog.text
    assert path.read_bytes() == whole
    caplog.clear()
    assert leaves(model_of(directory, "cpu", "int4")) == first
    assert "is not used" not in caplog.text


@pytest.mark.usefixtures("native")
def test_without_verify_packed_the_file_is_taken_as_it_is_and_the_fingerprint_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path, llama_tensors(CONFIG, torch.bfloat16))
    fresh = leaves(model_of(directory, "cpu", "int4", save_packed=True))
    info = EngineInfo(
        model="m", max_model_len=8, vocab_size=8, eos_token_ids=[], block_size=16, num_blocks=1, max_num_seqs=1,
        max_num_batched_tokens=16,
    )  # fmt: skip

    def fingerprint(verify: bool) -> str:
        config = EngineConfig(model=str(directory), verify_packed=verify, skip_tokenizer_init=True)
        return fingerprint_of(config, info)

    before = fingerprint(True), fingerprint(False)
    path = next(directory.glob("*.packed"))
    flip(path, next(entry.begin for name, entry in MappedFile(path).entries.items() if name.startswith("matrix/")))
    assert leaves(model_of(directory, "cpu", "int4", verify_packed=False)) != fresh
    assert "is not used" not in caplog.text
    assert fingerprint(False) != before[1], "another engine notices"
    assert fingerprint(True) == before[0], "an engine that compares runs no damaged bytes"
    assert len(damage_of(directory)) == 1
    assert leaves(model_of(directory, "cpu", "int4")) == fresh
    assert "--save-packed writes the file again: matrix/" in caplog.text


def test_ranks_that_map_the_file_compare_it_too(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    path, backend = save(directory), ToyBackend()
    flip(path, MappedFile(path).entries["tensor/model.norm.weight"].begin)

    class Stop(Exception):
        """The checkpoint is read."""

    def read(writer: Any) -> Any:
        raise Stop

    packing = source.Packing(MappedCheckpoint(directory), backend, "int4", lambda *n: None, 128, in_parts=True)  # type: ignore[arg-type]
    with pytest.raises(Stop):
        source.with_weights(lambda weights: "model", read, packing)


def test_changed_measurements_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They decide which matrices take floats, and so the bits of the answers."""
    path = tmp_path / "a.packed.measured"
    saved = SavedLosses(path, 128, may_write=True)
    saved.write("text", {"a": 0.25, "b": 0.5}, ["b"])
    assert saved.read("text") == ({"a": 0.25, "b": 0.5}, {"b"})
    path.write_text(path.read_text().replace("0.25", "0.35"))
    assert saved.read("text") == ({}, set())
    assert "is not used: it has been changed or damaged" in caplog.text
