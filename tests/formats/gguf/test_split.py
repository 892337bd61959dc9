"""A model that gguf-py has split into several GGUF files is the model of the whole file, whichever of them is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats.gguf.files import U32, gguf_file, scalar
from tests.formats.gguf.models import convert
from tests.support.harness import follow, load, random_ids, save_random

from headrace import gguf, hub, models
from headrace.engine.library.model_folder import ModelFolder
from headrace.plan import planner
from headrace.protocol.errors import CheckpointError, ModelNotFoundError
from headrace.serve.startup import num_weight_bytes
from headrace.text.tokenizer import Tokenizer

NAMES = [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def add_vocabulary(writer: Any) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(60))])
    writer.add_token_scores([0.0] * 63)
    writer.add_token_types([2, 3, 3, *([6] * 60)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A whole file, and the files of the same model in a folder of their own."""
    root = tmp_path_factory.mktemp("split")
    save_random(models.find("llama").TINY, root)
    (root / "parts").mkdir()
    whole = convert(root, root / "whole.gguf", fields=add_vocabulary)
    convert(root, root / "parts" / "model.gguf", fields=add_vocabulary, split=10)
    return whole, [root / "parts" / name for name in NAMES]


def test_any_file_and_the_folder_stand_for_the_model(written: tuple[Path, list[Path]]) -> None:
    whole, parts = written
    assert sorted(parts[0].parent.iterdir()) == parts
    for model in (parts[0], parts[2], parts[0].parent):
        assert hub.resolve(str(model)) == parts[0]
    token_ids = random_ids(20, models.find("llama").TINY["vocab_size"], 1)
    expected = follow(load(whole, dtype="float32"), token_ids, [20])
    assert torch.equal(follow(load(hub.resolve(str(parts[1])), dtype="float32"), token_ids, [20]), expected)
    assert Tokenizer.load(parts[2]).encode("a") == Tokenizer.load(whole).encode("a")
    assert hub.eos_token_ids(parts[0]) == hub.eos_token_ids(whole)
    assert planner.read(str(parts[1])).stored_bytes == planner.read(str(whole)).stored_bytes
    assert num_weight_bytes(parts[0]) == sum(path.stat().st_size for path in parts)


def test_a_packed_file_and_the_digest_belong_to_all_files(
    written: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(written[1][0].parent, tmp_path / "model"))
    first, digest = folder / NAMES[0], hub.digest(folder / NAMES[0])
    load(first, backend="cpu", save_packed=True)
    (packed,) = folder.glob("*.packed")
    (folder / NAMES[2]).touch()
    load(first, backend="cpu", save_packed=True)
    assert packed not in folder.glob("*.packed"), "another file is another model"
    assert hub.digest(first) == digest
    with open(folder / NAMES[2], "ab") as file:
        file.write(b"x")
    assert hub.digest(first) != digest


def test_a_missing_file_is_named(written: tuple[Path, list[Path]], tmp_path: Path) -> None:
    shutil.copy(written[1][1], tmp_path)
    for model in (tmp_path, tmp_path / NAMES[1]):
        with pytest.raises(ModelNotFoundError, match=f"{NAMES[0]} is missing: the model is split into 3 files"):
            hub.resolve(str(model))
    shutil.copy(written[1][0], tmp_path)
    with pytest.raises(CheckpointError, match=f"{NAMES[2]} is missing"):
        gguf.read(hub.resolve(str(tmp_path)))


def test_files_in_each_others_places_are_named(written: tuple[Path, list[Path]], tmp_path: Path) -> None:
    def read(*sources: Path | bytes) -> None:
        for name, source in zip(NAMES, sources, strict=True):
            (tmp_path / name).write_bytes(source if isinstance(source, bytes) else source.read_bytes())
        gguf.read(tmp_path / NAMES[0])

    one, two, three = written[1]
    with pytest.raises(CheckpointError, match=f"{NAMES[1]}: split.no is 2; it must be 1"):
        read(one, three, two)
    with pytest.raises(CheckpointError, match=f"{NAMES[1]}: split.count is 1; it must be 3"):
        read(one, written[0], three)
    fields = [scalar("split.no", U32, 1), scalar("split.count", U32, 3)]
    with pytest.raises(CheckpointError, match=r"split.tensors.count is \d+; it must be \d+, the tensors found"):
        read(one, gguf_file(fields), three)
    again = one.read_bytes().replace(b"split.no" + b"\2\0\0\0" + b"\0\0", b"split.no" + b"\2\0\0\0" + b"\1\0")
    with pytest.raises(CheckpointError, match=f"{NAMES[1]}: name of a tensor is .* not in another file of {NAMES[0]}"):
        read(one, again, three)
    shutil.copy(one, tmp_path / "model.gguf")
    with pytest.raises(
        CheckpointError, match=r"model.gguf: split.count is 3; it must be 1, as its name says; .*-of-00003"
    ):
        gguf.read(tmp_path / "model.gguf")
    read(one, two, three)  # the control
    (tmp_path / "alone.gguf").write_bytes(
        gguf_file([scalar("split.count", U32, 1), scalar("split.tensors.count", U32, 9)])
    )
    gguf.read(tmp_path / "alone.gguf")  # counts of a model that was one of several once


def test_a_models_folder_has_it_once(written: tuple[Path, list[Path]], tmp_path: Path) -> None:
    for path in written[1]:
        shutil.copy(path, tmp_path)
    shutil.copytree(written[1][0].parent, tmp_path / "owner" / "folded")
    folder = ModelFolder(str(tmp_path))
    assert folder.names() == ["model", "owner/folded"]
    size = sum(path.stat().st_size for path in written[1])
    assert folder.path("model") == tmp_path / NAMES[0]
    assert folder.facts("model").size == folder.facts("owner/folded").size == size
    folder.copy("model", "second")
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == NAMES
    folder.delete("model")
    assert folder.names() == ["owner/folded", "second"]
    assert not list(tmp_path.glob("*.gguf"))
