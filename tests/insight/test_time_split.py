"""Steps of several requests are split by rows, or by the step times that `headrace plan --check` fitted here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.insight.test_journal import engine
from tests.support.journal import live_through, notes_of_life, recorded, request

from headrace.cli.explain import explain as explain_command
from headrace.core.journal import Note, Step, decode_note
from headrace.insight.explain import explain
from headrace.insight.explainer import Explainer
from headrace.insight.lives import Life, Lives
from headrace.insight.observer import Counts
from headrace.insight.replay_worker import replay
from headrace.insight.time_split import by_fit, by_rows
from headrace.protocol import step_model
from headrace.protocol.step_model import StepModel

MODEL = StepModel(base=0.010, knots=(1, 8), slopes=(0.001, 0.0005), logits=0.002, seen=1e-5)


def step(starts: Sequence[int], lens: Sequence[int]) -> Step:
    return Step(1, (0.0, 0.0, 1.0, 1.0), list(range(1, len(lens) + 1)), list(starts), list(lens))


def test_a_prompt_takes_what_the_step_would_have_been_shorter_without_it() -> None:
    # 20 rows of a prompt, the last 20 of it, beside two sequences that decode after 10 and 30 tokens.
    one = step([10, 30, 0], [1, 1, 20])
    whole, without = MODEL([10, 30, 0], [1, 1, 20], 3), MODEL([10, 30], [1, 1], 2)
    fitted = by_fit(MODEL, one, 1.0, [2], [2], {})
    assert fitted.prefill == pytest.approx((whole - without) / whole)
    assert fitted.guesses == 0
    # Before its last chunk a prompt has no row of logits.
    inner = MODEL([10, 30, 0], [1, 1, 20], 2)
    assert by_fit(MODEL, one, 1.0, [2], [], {}).prefill == pytest.approx((inner - without) / inner)
    # By rows it has 20 of 22, as if reading the weights were its doing: the fit gives less.
    rows = by_rows(one, 1.0, [2], 0)
    assert rows.prefill == pytest.approx(20 / 22)
    assert fitted.prefill < 0.8 < rows.prefill


def test_prompts_divide_their_part_as_each_adds_to_the_step_and_draft_tokens_come_after_them() -> None:
    one = step([10, 0, 40], [1, 4, 16])
    shares = by_fit(MODEL, one, 2.0, [1, 2], [1], {0: 3})
    seen = 10.5 + 4 * 2 + 16 * 48
    guess_seen = 3 * 12.5
    whole = MODEL.of(1 + 20 + 3, 1 + 1 + 3, seen + guess_seen)
    decode, guessing = MODEL.of(1, 1, 10.5), MODEL.of(4, 4, 10.5 + guess_seen)
    assert shares.prefill == pytest.approx(2.0 * (whole - guessing) / whole)
    assert shares.guesses == pytest.approx(2.0 * (guessing - decode) / whole)
    first, second = whole - MODEL.of(20, 4, seen - 8 + guess_seen), whole - MODEL.of(8, 5, seen - 16 * 48 + guess_seen)
    assert shares.prompts[1] / shares.prompts[2] == pytest.approx(first / second)


@pytest.mark.parametrize("seed", range(40))
def test_no_part_is_below_zero_and_none_above_the_step(seed: int) -> None:
    # Fits have slopes below zero where they follow noise.
    slopes = [(seed * 7 % 5 - 2) * 1e-3, (seed % 3 - 1) * 1e-3]
    model = StepModel(base=0.002, knots=(1, 8), slopes=(slopes[0], slopes[1]), logits=-1e-3, seen=1e-7 * (seed - 20))
    one = step([10, 30, 0, 64], [1, 1, 1 + seed, 5])
    shares = by_fit(model, one, 1.0, [2, 3], [3], {0: seed % 4})
    assert min(*shares.prompts.values(), shares.guesses) >= 0
    assert shares.prefill + shares.guesses <= 1.0 + 1e-12


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[Note]:
    return list(notes_of_life(recorded(tmp_path_factory.mktemp("log") / "log")))


def follow(notes: list[Note], model: StepModel | None) -> Lives:
    lives = Lives()
    lives.step_model = model
    for note in notes:
        lives.follow(note)
    return lives


def off_by(lives: Lives) -> float:
    """How far the parts are from the latency, at most."""
    return max(abs(sum(life.parts.values()) - life.latency) for life in lives.ended.values())


def test_the_parts_sum_to_the_latency_by_either_split(notes: list[Note], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fitted = follow(notes, None), follow(notes, MODEL)
    assert len(fitted.ended) > 20
    assert max(off_by(plain), off_by(fitted)) < 1e-6
    assert min(seconds for life in fitted.ended.values() for seconds in life.parts.values()) >= 0
    assert (plain.split, fitted.split) == ("rows", "fitted step times")
    shared = [life for life in plain.ended.values() if {"beside_prefill", "beside_guesses"} <= life.parts.keys()]
    assert shared
    for life in shared:
        theirs = fitted.ended[life.request_id].parts
        assert theirs["beside_prefill"] != pytest.approx(life.parts["beside_prefill"], rel=1e-3)
        for name in ("queued", "preempted", "mask_late", "between_steps"):
            assert theirs.get(name) == life.parts.get(name), "what nobody shares is not split"

    # The control: the prompts' part is counted, and each life gets a part of its own beside it.
    def planted(model: StepModel, one: Step, seconds: float, prompts: Any, ends: Any, guesses: Any) -> Any:
        shares = by_fit(model, one, seconds, prompts, ends, guesses)
        return shares._replace(prompts={i: 2 * part for i, part in shares.prompts.items()})

    monkeypatch.setattr("headrace.insight.lives.by_fit", planted)
    assert any(seconds < 0 for life in follow(notes, MODEL).ended.values() for seconds in life.parts.values())


def test_an_explanation_names_what_it_was_split_by() -> None:
    words = {}
    for model in (None, MODEL):
        core, lives = engine(num_gpu_blocks_override=64), Lives()
        lives.step_model = model
        core.add(request("fast", [1, 2, 3], 12))
        lives.follow(decode_note(core.step().note))
        core.add(request("long", list(range(50, 110)), 2))
        while core.has_work():
            lives.follow(decode_note(core.step().note))
        explanation = explain(lives.ended["fast"], lives, lambda other: "another request")
        [sentence] = [each for each in explanation.sentences if "prefill chunks" in each]
        words[explanation.split] = sentence
    assert words["rows"].endswith("(estimated by rows)")
    assert words["fitted step times"].endswith("(estimated by fitted step times)")


def test_a_kept_fit_is_used_by_the_server_and_by_the_readers_of_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    monkeypatch.setattr(step_model, "FOLDER", tmp_path / "steps")
    core = recorded(tmp_path / "log")
    outputs = list(live_through(core))
    core.close()
    path = step_model.path_of_engine(core.info)
    counts = Counts(CollectorRegistry(), "m")

    def of_server() -> tuple[str, Life]:
        explainer = Explainer(counts, counts, None, lambda: core.info)
        for output in outputs:
            explainer.observer.on_step(output)
        slowest = max(explainer.lives.ended.values(), key=lambda life: life.parts.get("beside_prefill", 0.0))
        [explanation] = explainer.calls.of_requests([slowest.request_id])
        return explanation.split, slowest

    assert of_server()[0] == "rows"
    with caplog.at_level(logging.WARNING, "headrace.server"):
        path.parent.mkdir()
        path.write_text("{}")
        assert of_server()[0] == "rows"
    assert "explanations split steps by rows" in caplog.text
    for model, name in ((None, "rows"), (MODEL, "fitted step times")):
        path.unlink()
        if model is not None:
            step_model.save(path, model)
        split, life = of_server()
        assert split == name
        explain_command(tmp_path / "log", life.request_id)
        printed = capsys.readouterr().out
        assert f"{1e3 * life.parts['beside_prefill']:10.3f} ms  beside_prefill (estimated by {name})" in printed
        assert f'"split":"{name}"'.encode() in replay(tmp_path / "log")
        path.touch()
    # The control: another form of the same model has no fit.
    assert step_model.path_of_engine(msgspec.structs.replace(core.info, dtype="other")) != path
