"""Every stored form of the weights takes in memory what it takes in its file, or says at load what it costs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from bench.stored import FORMS, Form, make, make_plain, sizes_of

from headrace.backends.cpu import Cpu
from headrace.backends.native import native
from headrace.quant.placements import MOST_HELD

pytestmark = pytest.mark.skipif(native()[0] is None, reason="no native core")
NAMED = {form.name: form for form in FORMS}
PARTS = {"compressed-tensors int4-g128, v ignored": 2, "compressed-tensors int4-g128, v in int8": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("stored") / "plain")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_a_form_is_held_in_its_own_size(
    form: Form, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(form, plain, tmp_path / "out")
    with caplog.at_level(logging.INFO, "headrace"):
        sizes = sizes_of(path)
    # A form whose reason no longer holds is to lose it.
    assert (sizes.ratio > MOST_HELD) == bool(form.cost), sizes
    costs = [text for text in caplog.messages if " times as much" in text and "(table)" not in text]
    assert bool(costs) == bool(form.cost)
    assert sizes.parts >= PARTS.get(form.name, 1)


@pytest.mark.parametrize(
    "name", ["GPTQ int4-g128, act-order", "compressed-tensors int4-g128, v ignored", "Q4_K_M (GGUF)"]
)
def test_control_widened_weights_are_noticed(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(NAMED[name], plain, tmp_path / "out")
    assert sizes_of(path).ratio <= MOST_HELD
    monkeypatch.setattr(Cpu, "mixes", False)
    assert sizes_of(path).ratio > MOST_HELD
