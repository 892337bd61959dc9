"""Writing the packed form: whole or not at all, beside the model or in the cache, in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoints import CONFIG, llama_tensors, write_llama
from tests.support.packing import ToyBackend, form_of, leaves, load, mapped, save

from headrace.checkpoint import packed
from headrace.checkpoint.mapped import MappedCheckpoint, stacked_name
from headrace.checkpoint.packed import PackedWriter
from headrace.protocol.errors import CheckpointError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of a test goes to the real cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Watched:
    """A file whose writes are announced."""

    def __init__(self, file: IO[bytes], on_write: Callable[[], None]) -> None:
        self.file, self.on_write = file, on_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.on_write()
        return self.file.write(data)


def watch_writes(monkeypatch: pytest.MonkeyPatch, on_write: Callable[[], None]) -> None:
    """Call `on_write` before each write to a new file."""
    real = Path.open

    def watched(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = real(self, mode, *args, **options)
        return Watched(file, on_write) if mode == "xb" else file  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", watched)


# ---------------------------------------------------------------------------------------- writing


def test_a_directory_that_can_not_be_written_to(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_llama(tmp_path / "model")
    real = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self.parent == directory and args[:1] == ("xb",):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    path = save(directory)
    assert path.is_relative_to(home / ".cache" / "headrace" / "packed")
    assert not list(directory.glob("*.packed*"))
    assert leaves(mapped(directory)) == leaves(load(directory, "int4"))
    # Another model of the same bytes elsewhere has a place of its own.
    assert packed.cache_directory(tmp_path / "other") != path.parent


def test_nowhere_to_write_to_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path / "model")
    (tmp_path / "home").write_text("not a directory")
    real = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if args[:1] == ("xb",):
            raise OSError(30, "Read-only file system", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with PackedWriter(MappedCheckpoint(directory), form_of(ToyBackend(), "int4")) as writer:
        model = load(directory, "int4", None, writer)
    assert writer.path is None
    assert leaves(model) == leaves(load(directory, "int4"))
    assert "can not be saved" in caplog.text
    assert "Read-only" in caplog.text


@pytest.mark.parametrize("fails_at", ["write", "fsync"])
def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    num_writes = 0

    def write() -> None:
        nonlocal num_writes
        num_writes += 1
        if fails_at == "write" and num_writes > 9:
            full()

    watch_writes(monkeypatch, write)
    if fails_at == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    with PackedWriter(MappedCheckpoint(directory), form_of(ToyBackend(), "int4")) as writer:
        model = load(directory, "int4", None, writer)
    assert writer.path is None
    assert num_writes >= 10
    assert "No space left" in caplog.text
    assert [path.name for path in directory.glob("headrace-*")] == []
    assert leaves(model) == leaves(load(directory, "int4"))


def test_a_crash_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    broken = llama_tensors()
    broken["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    save_file(broken, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        save(directory)
    assert [path.name for path in directory.glob("headrace-*")] == []


def test_a_header_that_does_not_fit_its_place_is_not_written_over_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_llama(tmp_path)
    with PackedWriter(MappedCheckpoint(directory), form_of(ToyBackend(), "int4")) as writer:
        for i in range(3000):
            writer.tensor(f"made.up.{i}.{'x' * 50}", np.zeros(3, np.float32))
    assert writer.path is None
    assert "does not fit" in caplog.text
    assert [path.name for path in directory.glob("headrace-*")] == []


def test_nobody_sees_a_part_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every write: there is no file, or the whole old one."""
    directory = write_llama(tmp_path)
    seen: list[bytes | None] = []

    def look() -> None:
        files = list(directory.glob("*.packed"))
        seen.append(files[0].read_bytes() if files else None)

    watch_writes(monkeypatch, look)
    path = save(directory)
    assert set(seen) == {None}
    whole = path.read_bytes()
    seen.clear()
    save(directory)
    assert set(seen) == {whole}
    assert path.read_bytes() == whole


def test_what_killed_processes_left_is_removed_in_time(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    path = save(directory)
    old, young = (directory / f"{path.name}.{name}.tmp" for name in ("old", "young"))
    for left in (old, young):
        left.write_bytes(b"half")
    os.utime(old, (1, 1))
    save(directory)
    assert not old.exists()
    assert young.exists()


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            save(directory)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert leaves(mapped(directory)) == leaves(load(directory, "int4"))


def test_names_of_stacked_layers() -> None:
    assert stacked_name(["lm_head"]) == "lm_head"
    assert stacked_name(["a.b.q", "a.b.k"]) == "a.b.q+k"
    assert stacked_name(["a.q", "b.q"]) == "a.q+b.q"


# ---------------------------------------------------------------------------------------- memory

MEMORY = """
import sys
from pathlib import Path
from headrace.checkpoint import reader
from tests.support.packing import load
directory, small = Path(sys.argv[1]), Path(sys.argv[2])
def resident(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) * 1024
def peak(release_bytes):
    reader.RELEASE_BYTES = release_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = resident("VmRSS")
    model = load(directory, "int8")
    matrices = [m for l in model.layers for m in (l.attention.qkv, l.attention.out, l.mlp.gate_up, l.mlp.down)]
    return resident("VmHWM") - base, sum(m.packed.nbytes for m in (model.head, *matrices))
load(small, "int8")  # what is loaded once: torch's threads and buffers
print(*peak(reader.RELEASE_BYTES), peak(2**40)[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads /proc")
def test_loading_takes_the_packed_size_and_one_layer(tmp_path: Path) -> None:
    """100 M weights in bfloat16 (200 MB) become codes of a byte each in the toy backend; mapped pages count."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192, "num_hidden_layers": 6,
             "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    directory = write_llama(tmp_path / "large", llama_tensors(CONFIG | shape, torch.bfloat16), **shape)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(directory), str(write_llama(tmp_path / "small"))],
        capture_output=True, text=True, timeout=100, check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    peak, size, careless = (int(word) for word in done.stdout.split())
    layer = 2 * (4 * 1024**2 + 3 * 1024 * 4096)
    bound = 1.3 * size + layer + 48 * 2**20
    assert size > 100e6
    # Beside the layer: what is mapped between two releases, and a slab with its scratch.
    assert peak < bound, f"{peak >> 20} MiB for {size >> 20} MiB of matrices"
    assert careless > bound, "had nothing been given back, it would not be seen"
