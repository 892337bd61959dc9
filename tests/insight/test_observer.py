"""The observer keeps what it sees, unread, and readers find the same whenever they look."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.support.journal import live_through, recorded

from headrace.insight import observer
from headrace.insight.explainer import Explainer
from headrace.insight.lives import Life
from headrace.insight.observer import Counts, Delivery, EngineEnd, Entry, Observer, StepNote
from headrace.protocol.step import EngineInfo, StepOutput


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineInfo, list[StepOutput]]]:
    core = recorded(tmp_path_factory.mktemp("log") / "log")
    yield core.info, list(live_through(core))
    core.close()


def explainer_of(info: EngineInfo) -> Explainer:
    counts = Counts(CollectorRegistry(), "m")
    return Explainer(counts, counts, None, lambda: info)


def lives_of(explainer: Explainer) -> dict[str, Life]:
    return {name: msgspec.structs.replace(life) for name, life in explainer.lives.ended.items()}


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_lives_do_not_depend_on_when_they_are_read(
    engine: tuple[EngineInfo, list[StepOutput]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, outputs = engine
    at_once, late = explainer_of(info), explainer_of(info)
    monkeypatch.setattr(observer, "MAX_UNREAD", most)
    for output in outputs:
        at_once.observer.on_step(output)
        assert at_once.lives.reads.weight_bytes == info.weight_bytes
        late.observer.on_step(output)
    assert lives_of(at_once) == lives_of(late)
    assert len(lives_of(late)) > 3


def test_the_log_is_bounded_and_handed_over_in_order(
    engine: tuple[EngineInfo, list[StepOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    info, outputs = engine
    outputs = [output for output in outputs if output.note]
    entries: list[Entry] = []
    counts = Counts(CollectorRegistry(), "m")
    log = Observer(counts, counts, entries.append, lambda: info)
    monkeypatch.setattr(observer, "MAX_UNREAD", 3)
    for output in outputs:
        log.on_step(output)
    assert [entry.note for entry in entries if isinstance(entry, StepNote)] == [each.note for each in outputs[:-3]]
    log.on_end(["a"])
    log.hand_over()
    assert [getattr(entry, "note", None) for entry in entries] == [*(each.note for each in outputs), None]
    assert entries[-1] == EngineEnd(0, frozenset({"a"}))
    log.is_followed = True
    log.on_step(outputs[0])
    # The numbers of an engine come with its first step.
    assert [entry.info for entry in entries if isinstance(entry, StepNote)].count(info) == 2
    assert entries[-1] == StepNote(0, outputs[0].note, info)
    assert not any(isinstance(entry, Delivery) for entry in entries)
