"""GGUF files whose writing was broken off: gone on with, to the same bytes, without what was done before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.shallow import shallow

from headrace.quantize import gguf_file, gguf_writer, mixed
from headrace.quantize.base import Options
from headrace.quantize.driver import STATE, QuantizeRun, quantise_checkpoint
from headrace.text.tokenizer import Tokenizer

PATH = Path(shallow())

IDS = [Tokenizer.load(PATH).encode("Once upon a time there was a little girl named Lily. She loved her dog. " * 2)]


class Killed(BaseException):
    """What nobody catches, as a signal."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(PATH, tmp_path / "model")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "NOTED_BYTES", 0)


def counted(monkeypatch: pytest.MonkeyPatch, die_at: int = -1) -> list[str]:
    """Names of the tensors that are encoded from now on; the one at `die_at` kills."""
    names: list[str] = []

    def encode(kind: str, rows: Any, name: str = "") -> Any:
        if len(names) == die_at:
            raise Killed
        names.append(name)
        return original(kind, rows, name)

    original = gguf_writer.encode
    monkeypatch.setattr(gguf_writer, "encode", encode)
    return names


def broken_off(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], die_at: int) -> None:
    with monkeypatch.context() as patched:
        counted(patched, die_at)
        with pytest.raises(Killed):
            make()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("die_at", [0, 1, 17, 37])
def test_a_broken_run_goes_on_to_the_same_bytes(
    die_at: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = tmp_path / "whole.gguf", tmp_path / "model.gguf"
    gguf_writer.convert(model, whole, "Q4_0")
    broken_off(monkeypatch, lambda: gguf_writer.convert(model, path, "Q4_0"), die_at)
    assert not path.exists()
    names = counted(monkeypatch)
    gguf_writer.convert(model, path, "Q4_0")
    assert path.read_bytes() == whole.read_bytes()
    assert len(names) == 38 - max(die_at - 1, 0)  # all but what was noted: the last tensor's end is seen by the next
    assert {file.name for file in tmp_path.iterdir()} == {"model", "whole.gguf", "model.gguf"}


def test_what_was_of_another_run_is_not_gone_on_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "model.gguf", tmp_path / "whole.gguf"
    broken_off(monkeypatch, lambda: gguf_writer.convert(model, path, "Q4_0"), 20)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2000:-1000] = bytes(1000)
    weights.write_bytes(data)
    with monkeypatch.context() as patched:
        names = counted(patched)
        gguf_writer.convert(model, path, "Q4_0")
    assert len(names) == 38
    gguf_writer.convert(model, whole, "Q4_0")
    assert path.read_bytes() == whole.read_bytes()
    path.unlink()
    broken_off(monkeypatch, lambda: gguf_writer.convert(model, path, "Q4_0"), 20)
    names = counted(monkeypatch)
    gguf_writer.convert(model, path, "Q8_0")
    assert len(names) == 38


def test_a_part_that_was_cut_short_is_not_trusted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = tmp_path / "model.gguf", tmp_path / "whole.gguf"
    gguf_writer.convert(model, whole, "Q4_0")
    broken_off(monkeypatch, lambda: gguf_writer.convert(model, path, "Q4_0"), 20)
    part = tmp_path / "model.gguf.part"
    part.write_bytes(part.read_bytes()[:200_000])
    gguf_writer.convert(model, path, "Q4_0")
    assert path.read_bytes() == whole.read_bytes()


def test_a_method_s_codes_that_were_all_but_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(method="rtn", bits=4, group_size=32)
    first, second = tmp_path / "a" / "made", tmp_path / "b" / "made"
    quantise_checkpoint(model, first, options, "gguf")
    broken_off(monkeypatch, lambda: quantise_checkpoint(model, second, options, "gguf"), 5)
    assert (second / STATE).is_file()
    monkeypatch.setattr(QuantizeRun, "_quantise", lambda *_: pytest.fail("a layer was made again"))
    quantise_checkpoint(model, second, options, "gguf")
    assert (second / "made.gguf").read_bytes() == (first / "made.gguf").read_bytes()
    assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()}


def test_groups_that_were_measured_are_not_measured_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed, "LADDER", ("Q4_0", "Q8_0"))
    whole, path = tmp_path / "whole.gguf", tmp_path / "model.gguf"
    expected = mixed.write(model, whole, 6.0, IDS)
    requests: list[str] = []
    original = mixed.Measured.measure

    def measure(self: mixed.Measured, group: mixed.Group) -> None:
        requests.append(group.plans[0].name)
        if len(requests) == 9:
            raise Killed
        original(self, group)

    monkeypatch.setattr(mixed.Measured, "measure", measure)
    with pytest.raises(Killed):
        mixed.write(model, path, 6.0, IDS)
    actual = mixed.write(model, path, 6.0, IDS)
    assert len(requests) == len(set(requests)) + 1 == 18
    assert (actual.predicted, actual.measured) == (expected.predicted, expected.measured)
    assert path.read_bytes() == whole.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"model", "whole.gguf", "model.gguf"}
