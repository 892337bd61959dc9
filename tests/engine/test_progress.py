"""The lines by which long tasks show their progress where stderr is no terminal. A clock of the test's own runs."""

from __future__ import annotations

import logging

import pytest

from headrace.engine import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("headrace.env.is_terminal", lambda descriptor: False)
    return now


def test_lines_have_progress_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("Requests") as show:
        show(40, 100)
        clock[0] += 4
        show(48, 100)
        clock[0] += 4
        show(56, 100, "file.jsonl")
        clock[0] += 92
        show(60, 100)
    assert capsys.readouterr().err.splitlines() == [
        "Requests: 56 of 100 (56 %), 2.0/s, 22 s left at this rate, file.jsonl",
        "Requests: 60 of 100 (60 %), 0.2/s, 200 s left at this rate",
    ], "the 40 that an earlier run did count for no rate"


def test_each_long_step_has_a_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("rungs", has_long_steps=True) as show:
        show(0, 0, "the first")
        show(0, 3, "the second")
        show(0, 3, "the second")
        clock[0] += 30
        show(1, 3, "the third")
    assert capsys.readouterr().err.splitlines() == [
        "rungs: 0 of 0 (0 %), the first",
        "rungs: 0 of 3 (0 %), the second",
        "rungs: 1 of 3 (33 %), the third",
    ], "no rate of steps that are not of one length"


def test_nothing_is_shown_that_is_not_asked_for(
    clock: list[float], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with progress.progress_bar("hidden", is_visible=False) as show:
        clock[0] += 60
        show(1, 2)
    with caplog.at_level(logging.INFO), progress.progress_bar("logged", logger=logging.getLogger("test")) as show:
        clock[0] += 60
        show(1, 2)
    assert capsys.readouterr().err == ""
    assert caplog.messages == ["logged: 1 of 2 (50%)"]
