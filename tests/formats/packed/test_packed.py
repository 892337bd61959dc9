"""The packed form beside the model: what was packed is mapped; the log names a file that does not fit."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.checkpoints import CONFIG, llama_tensors, write_llama
from tests.support.packing import ToyBackend, form_of, found, leaves, load, mapped, packed_bytes, save, tiny

from headrace.checkpoint import packed
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.mapped import MappedCheckpoint, MappedFile
from headrace.checkpoint.packed import PackedFile
from headrace.checkpoint.packed_weights import PackedWeights
from headrace.checkpoint.quantising import Loading
from headrace.checkpoint.tensors import Checkpoint
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import NAMES, Scheme, parse


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of a test goes to the real cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("quantization", [None, *NAMES])
def test_what_is_mapped_is_what_was_packed(quantization: str | None, tmp_path: Path) -> None:
    directory = write_llama(tmp_path, llama_tensors(dtype=torch.bfloat16))
    path = save(directory, quantization)
    assert path.parent == directory
    assert not list(directory.glob("*.tmp"))
    fresh, again = leaves(load(directory, quantization)), leaves(mapped(directory, quantization))
    assert fresh == again
    assert sum(len(value) == 3 for value in fresh.values()) >= 2 * 4 + 1  # matrices


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "qwen2", "qwen3", "gemma2"])
def test_every_kind_of_model(model_type: str, tmp_path: Path) -> None:
    """Biases, transposed weights, position tables, routers, tied heads."""
    directory = tiny(tmp_path, model_type)
    save(directory)
    assert leaves(load(directory, "int4")) == leaves(mapped(directory))


def test_two_quantizations_give_two_models_and_two_files(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    assert save(directory, "int4") != save(directory, "int8")
    assert leaves(mapped(directory, "int4")) != leaves(mapped(directory, "int8"))


def test_what_is_quantised_and_what_is_not(tmp_path: Path) -> None:
    model = load(tiny(tmp_path, "mixtral"), "int4")
    experts = model.layers[0].mlp.layer
    assert experts.router.scheme.kind == "f"
    assert {m.scheme.kind for m in (*experts.gate_up, *experts.down, model.layers[0].attention.qkv)} == {"i4"}
    assert (model.head.scheme.group, experts.down[0].scheme) == (32, Scheme("i4", 64, book="iq4_nl"))
    tensors = llama_tensors(dtype=torch.float16)
    model = load(write_llama(tmp_path / "llama", tensors), "int8", ToyBackend("float16"))
    assert tuple(model.embedding) == ("float16", tensors["model.embed_tokens.weight"].numpy().tobytes())
    assert (model.norm.weight == 1).all()


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    checkpoint, config = Checkpoint(write_llama(tmp_path)), {"quant_method": "none"}
    with pytest.raises(CheckpointError, match="quantised already"):
        SafetensorsWeights(checkpoint, ToyBackend(), config, Loading(quantization=parse("int4")))  # type: ignore[arg-type]


def test_others_do_not_take_it_for_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    names = MappedCheckpoint(directory).names
    save(directory)
    assert MappedCheckpoint(directory).names == names


def test_it_is_a_safetensors_file_whose_matrices_begin_at_pages(tmp_path: Path) -> None:
    path = save(write_llama(tmp_path))
    with safe_open(path, "np") as theirs:
        file = MappedFile(path)
        assert set(theirs.keys()) == file.entries.keys()
        for name, entry in file.entries.items():
            assert theirs.get_tensor(name).tobytes() == file.array(name).tobytes()
            if name.startswith("matrix/"):
                assert entry.begin % 4096 == 0
                assert file.array(name).ctypes.data % 4096 == 0
            elif not name.startswith(("pad/", "digest")):
                assert entry.begin % 64 == 0


def test_the_embedding_table_is_not_copied(tmp_path: Path) -> None:
    path = save(write_llama(tmp_path, vocab_size=50))
    assert not any("embed" in name for name in MappedFile(path).entries)


@pytest.mark.parametrize("cached", ["all", "some", "half a piece", "none", "unknown"])
def test_reading_copies_every_matrix(cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the page cache has of the file. The pieces that it does not have come last."""
    directory = write_llama(tmp_path)
    preadv, order = os.preadv, []

    def read_cached(descriptor: int, buffers: list[memoryview], begin: int, flags: int = 0) -> int:
        if flags and (cached == "none" or (cached == "some" and begin // 4096 % 3)):
            raise BlockingIOError
        if flags and cached == "half a piece":
            if begin % 4096:
                raise BlockingIOError
            buffers = [buffers[0][:1000]]
        order.append(flags)
        return preadv(descriptor, buffers, begin)

    monkeypatch.setattr(os, "preadv", read_cached)
    monkeypatch.setattr("headrace.checkpoint.packed.NO_WAIT", 0 if cached == "unknown" else 8)
    save(directory)
    first_read, read = found(directory), found(directory)
    assert first_read is not None
    assert read is not None
    monkeypatch.setattr("headrace.checkpoint.packed.PIECE_BYTES", 4096)
    before = {name: matrix.data for name, matrix in read.matrices.items()}
    read.read(lambda size: np.zeros(size, np.uint8))
    assert read.matrices.keys() == first_read.matrices.keys()
    for name, matrix in read.matrices.items():
        assert np.array_equal(matrix.data, first_read.matrices[name].data)
        assert not np.shares_memory(matrix.data, before[name])
    assert order == sorted(order, reverse=True)
    assert (0 in order) == (cached != "all")


def test_a_file_that_shrinks_while_it_is_read_is_told_of(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    save(directory)
    file = found(directory)
    assert file is not None

    def allocate(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        os.truncate(file.path, size // 2)
        return np.zeros(size, np.uint8)

    with pytest.raises(CheckpointError, match="ends early"):
        file.read(allocate)


# ---------------------------------------------------------------------------------------- what does not fit


def touch(directory: Path) -> None:
    os.utime(directory / "model.safetensors", ns=(1, 1))


def change_weights(directory: Path) -> None:
    save_file(llama_tensors(dtype=torch.float16), directory / "model.safetensors")


def change_config(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-6}))


def nothing(directory: Path) -> None:
    pass


def unused(directory: Path, caplog: pytest.LogCaptureFixture, *words: str, **options: Any) -> None:
    """The file is not used, and a warning says why."""
    with caplog.at_level(logging.WARNING):
        assert found(directory, **options) is None
    assert len(caplog.records) == 1
    for word in ("is not used", *words):
        assert word in caplog.text


@pytest.mark.parametrize(
    ("change", "word"),
    [(touch, "model.safetensors"), (change_weights, "model.safetensors"), (change_config, "config.json")],
)
def test_a_stale_file_is_told_of_and_replaced(
    change: Callable[[Path], None], word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path)
    old = save(directory)
    change(directory)
    unused(directory, caplog, f"packed before {word} changed")
    new = save(directory)
    assert new != old
    assert not old.exists()
    assert leaves(mapped(directory)) == leaves(load(directory, "int4"))


def test_an_unchanged_checkpoint_is_not_stale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_llama(tmp_path)
    save(directory)
    assert found(directory) is not None
    assert not caplog.records


def test_another_layout_dtype_or_method_does_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_llama(tmp_path)
    save(directory)
    unused(directory, caplog, "layouts", "toy/i4/2", backend=ToyBackend(version="2"))
    caplog.clear()
    unused(directory, caplog, "dtype", "float16", backend=ToyBackend("float16"))
    for name in ("METHOD", "CONTAINER"):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(packed, name, 99)
            unused(directory, caplog, name.lower(), "99")
    caplog.clear()
    backend = ToyBackend()
    backend.packed_bytes = lambda *sizes: packed_bytes(*sizes) + 64  # type: ignore[method-assign]
    unused(directory, caplog, "bytes, expected", backend=backend)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4096, -1, -32, -5000])
def test_a_truncated_file_is_not_used(size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_llama(tmp_path)
    path = save(directory)
    content = path.read_bytes()
    path.write_bytes(content[:size])
    unused(directory, caplog, "not a readable safetensors file")
    path.write_bytes(content)
    assert found(directory) is not None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A packed file beside its model, and what is in it."""
    path = save(write_llama(tmp_path_factory.mktemp("saved")))
    return path, path.read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_of_the_header_that_is_changed_is_noticed(data: st.DataObject, saved: tuple[Path, bytes]) -> None:
    path, whole = saved
    content = bytearray(whole)
    length = 8 + struct.unpack("<Q", content[:8])[0]
    used = len(whole[:length].rstrip())
    at = data.draw(st.integers(0, used - 1) | st.integers(used, length - 1) | st.integers(-32, -1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    backend = ToyBackend()
    with pytest.raises(CheckpointError):
        PackedFile(path, MappedCheckpoint(path.parent), form_of(backend, "int4"), backend)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change header and facts, and put them right with the digest: what somebody could write who knows the format."""
    import hashlib

    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["headrace"])
    change(header, facts)
    header["__metadata__"]["headrace"] = json.dumps(facts)
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(content[:8] + text + content[8 + length : -32] + hashlib.sha256(text).digest())


QKV = "model.layers.0.self_attn.q_proj+k_proj+v_proj"


@pytest.mark.parametrize(
    "facts",
    [["i4", 32, 65, 64, 0], ["i4", 64, 32, 64, 0], ["i4", 32, -64, 64, 0], ["i5", 32, 64, 64, 0], ["f", 32, 64, 0, 0],
     ["i4", 32, 64, 48, 0], ["i4", 32, 64, 64, 6], ["i6", 32, 64, 64, 2], ["i8", 32, 64, 64, 0],
     ["i4", 32, 64, 64], ["i4", 32, 64, 64, 0, 0], ["i4", "32", 64, 64, 0], ["i4", True, 64, 64, 0],
     ["i4", 2**40, 2**40, 64, 0], [["i4"], 32, 64, 64, 0], None, 7, "i4"],
    ids=str,
)  # fmt: skip
def test_sizes_that_would_lead_a_kernel_out_of_the_file_are_refused(
    facts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path)
    path = save(directory)
    rewritten(path, lambda header, head: None)
    assert found(directory) is not None  # the way of changing it is sound
    rewritten(path, lambda header, head: head["matrices"].update({QKV: facts}))
    unused(directory, caplog, QKV)


def test_a_foreign_file_of_that_name_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_llama(tmp_path)
    path = save(directory)
    save_file({"a": torch.ones(3)}, path)
    unused(directory, caplog, "no packed file")


def test_a_model_that_asks_for_something_else_is_told(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    save(directory)
    file = found(directory)
    assert file is not None
    weights = PackedWeights(file, MappedCheckpoint(directory), ToyBackend())
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    for requests in (
        lambda: weights.matrix(Linear([q], 32, [32])),
        lambda: weights.matrix(Linear([q, k, q.replace("q_", "v_")], 32, [32, 16, 17])),
        lambda: weights.matrix(Linear([q, k, q.replace("q_", "v_")], 32, [32, 16, 16], bias=True)),
        lambda: weights.matrix(Linear([q, k, q.replace("q_", "v_")], 32, [32, 16, 16], plain=True)),
        lambda: weights.tensor("model.norm.weight", (33,)),
        lambda: weights.tensor("model.nothing.weight", (32,)),
        lambda: weights.table("model.embed_tokens.weight", (51, 32)),
        lambda: weights.table("model.nothing.weight", (50, 32)),
        weights.finish,
    ):
        with pytest.raises(CheckpointError):
            requests()
    assert weights.matrix(Linear([q, k, q.replace("q_", "v_")], 32, [32, 16, 16])).num_out == 64


# ---------------------------------------------------------------------------------------- with the native kernels


@pytest.fixture
def native() -> None:
    from headrace.backends.native import native

    module, reason = native()
    if module is None:
        pytest.skip(reason)


def model_of(directory: Path, backend: str, quantization: str | None, **options: Any) -> Any:
    from headrace.engine.library.load import load_model
    from headrace.protocol.config import EngineConfig

    config = EngineConfig(model=str(directory), backend=backend, quantization=quantization, **options)
    return load_model(config, directory, lambda done, total: None)[1]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("quantization", [None, *NAMES])
def test_both_backends_hold_the_same_weights_packed_or_not(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 70}  # no multiple of most groups
    directory = write_llama(tmp_path, llama_tensors(CONFIG | shape, torch.bfloat16), **shape)
    ours = model_of(directory, "cpu", quantization, save_packed=True)
    # From here on the checkpoint is not to be read by torch any more.
    theirs = model_of(directory, "torch_ref", quantization, dtype="float32")
    monkeypatch.setattr("headrace.checkpoint.loader.SafetensorsWeights.__init__", None)
    again = model_of(directory, "cpu", quantization)
    fresh = leaves(ours)
    assert fresh == leaves(again)
    assert sum(isinstance(value, tuple) for value in fresh.values()) == 2 * 4 + 1
    for layer in range(2):
        for path in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"):
            first, second = path.split(".")
            a, b = (getattr(getattr(m.layers[layer], first), second).dense() for m in (again, theirs))
            assert np.array_equal(a, b.numpy()), path
    assert np.array_equal(again.head.dense(), theirs.head.dense().numpy())
