"""Mixed precision: budgets are kept, bits go where they save most, and a mixture beats one type for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.shallow import shallow

from headrace.protocol.errors import RequestError
from headrace.quantize import mixed
from headrace.quantize.mixed import Step, choose, lower_hull
from headrace.text.tokenizer import Tokenizer

PATH = Path(shallow())

TEXT = "Once upon a time there was a little girl named Lily. She loved to play in the garden with her dog. " * 4


def ids() -> list[int]:
    return Tokenizer.load(PATH).encode(TEXT)


def measured(groups: list[list[Step]], num_weights: int = 100, other_bits: float = 0.0) -> Any:
    layers = [SimpleNamespace(steps=steps) for steps in groups]
    return SimpleNamespace(groups=layers, num_weights=num_weights, other_bits=other_bits)


def test_hull_leaves_out_what_saves_little() -> None:
    steps = [Step("a", 1, 10), Step("b", 2, 9), Step("c", 3, 2), Step("d", 4, 3), Step("e", 8, 1)]
    assert [step.kind for step in lower_hull(steps)] == ["a", "c", "e"]


def test_bits_go_where_they_save_most() -> None:
    dear = [Step("low", 100, 5.0), Step("high", 200, 1.0)]
    cheap = [Step("low", 100, 0.5), Step("high", 200, 0.1)]
    assert [step.kind for step in choose(measured([cheap, dear]), 3.0)] == ["low", "high"]
    assert [step.kind for step in choose(measured([cheap, dear]), 4.0)] == ["high", "high"]
    assert [step.kind for step in choose(measured([cheap, dear]), 2.0)] == ["low", "low"]
    with pytest.raises(RequestError, match="at least 2.50"):
        choose(measured([cheap, dear], other_bits=50.0), 2.4)


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """What a group costs depends on model, text and ladder alone, and so is found out once for all tests here."""
    known: dict[tuple[object, ...], list[Step]] = {}
    original = mixed.Measured.measure

    def measure(self: mixed.Measured, group: mixed.Group) -> None:
        key = (mixed.LADDER, group.plans[0].name)
        if key not in known:
            original(self, group)
            known[key] = group.steps
        group.steps = known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed.Measured, "measure", measure)
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [3.5, 4.6, 6.0])
def test_budget_and_loss_of_the_built_in_model(bits: float, tmp_path: Path) -> None:
    result = mixed.write(PATH, tmp_path / "mixed.gguf", bits, [ids()])
    assert bits - 0.6 < result.written.bits <= bits
    assert 0 < result.measured < 5 * result.predicted


@pytest.mark.slow
def test_a_mixture_is_below_one_type_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bits that Q4_K takes for all; the control: the same with types chosen backwards is worse."""
    monkeypatch.setattr(mixed, "LADDER", ("Q4_K",))
    plain = mixed.write(PATH, tmp_path / "plain.gguf", 16.0, [ids()])
    monkeypatch.undo()
    result = mixed.write(PATH, tmp_path / "mixed.gguf", plain.written.bits + 0.001, [ids()])
    assert result.written.bits <= plain.written.bits + 0.001
    assert result.measured < plain.measured
    measure = mixed.Measured.measure

    def backwards(self: mixed.Measured, group: mixed.Group) -> None:
        measure(self, group)
        group.steps = [step._replace(loss=step.loss / group.steps[0].loss ** 2) for step in group.steps]

    monkeypatch.setattr(mixed.Measured, "measure", backwards)
    wrong = mixed.write(PATH, tmp_path / "wrong.gguf", plain.written.bits + 0.001, [ids()])
    assert wrong.measured > result.measured


def test_a_text_is_needed(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="calibration"):
        mixed.write(PATH, tmp_path / "mixed.gguf", 4.5, [])
    with pytest.raises(RequestError, match="vocabulary"):
        mixed.write(PATH, tmp_path / "mixed.gguf", 4.5, [[1, 2, 99999]])
