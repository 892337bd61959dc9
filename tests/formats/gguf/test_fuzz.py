"""S-27, C-6: thousands of the damaged files of `tests.programs.fuzz_gguf`, and proof that faults would be found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.programs import fuzz_gguf
from tests.programs.fuzz_gguf import Course, campaign, damaged, seeds

from headrace import hub
from headrace.checkpoint import gguf_source
from headrace.checkpoint.gguf_parts import Part
from headrace.gguf import GGUF


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy; time is the campaign's matter."""
    monkeypatch.setattr(fuzz_gguf, "MAX_SECONDS", 60.0)


def test_S_27_C_6_damaged_models_are_read_or_refused(tmp_path: Path) -> None:
    outcomes = campaign(3000, seed=27, first=0, keep=tmp_path)
    assert outcomes.keys() == {"read", "refused"}, list(tmp_path.iterdir())
    assert min(outcomes.values()) > 300, "damage that is always or never noticed tests nothing"


def test_a_mutation_can_be_made_again() -> None:
    files = seeds()
    assert [damaged(files, 1, i) for i in range(20)] == [damaged(files, 1, i) for i in range(20)]
    assert len({damaged(files, seed, 5) for seed in range(20)}) > 15


def test_control_a_shape_that_nobody_checks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: gguf_source.GGUFFormat, name: str, shape: tuple[int, ...]) -> Part:
        self.parts.take(name)
        return self._reading.parts[name]

    monkeypatch.setattr(gguf_source.GGUFFormat, "_part", trusting)
    monkeypatch.setattr(fuzz_gguf, "EVERY_MODEL", 1)
    assert campaign(400, seed=27, first=0, keep=None).keys() - {"read", "refused"}


def test_control_an_id_that_nobody_checks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(file: GGUF) -> str:
        tokens = file.texts("tokenizer.ggml.tokens", 2**20, 4096) or []
        return tokens[file.integer("tokenizer.ggml.eos_token_id") or 0]

    monkeypatch.setattr(hub, "gguf_ends", trusting)
    assert campaign(1500, seed=27, first=0, keep=None).keys() - {"read", "refused"}


def test_control_memory_beyond_the_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course()
    ballast: list[object] = []
    right = course.use

    def greedy(data: bytes, *, tokenizer: bool, model: bool) -> str:
        if len(ballast) < 8:
            ballast.append(np.ones(2**24, np.uint8))
        return right(data, tokenizer=tokenizer, model=model)

    monkeypatch.setattr(fuzz_gguf, "EVERY_PEAK", 1)
    monkeypatch.setattr(fuzz_gguf, "MAX_BYTES", 2**20)
    monkeypatch.setattr(course, "use", greedy)
    monkeypatch.setattr(fuzz_gguf, "peak_bytes", lambda: sum(array.nbytes for array in ballast))  # type: ignore[attr-defined]
    assert "memory within 1" in campaign(20, seed=1, first=0, keep=None, course=course)


def test_S_27_sound_seeds_have_every_block_type() -> None:
    kinds = {info.type for data in seeds() for info in GGUF(data).tensors.values()}
    assert kinds == fuzz_gguf.NUMBERS.keys() - {"I8", "I16", "I32", "I64", "F64"}
