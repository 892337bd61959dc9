"""R-02, R-03: when an engine counts as frozen, and when it is only busy. Time is handed in, none passes."""

from __future__ import annotations

import pytest

from headrace.protocol.watchdog import PATIENCE, Watchdog


def seconds_to_end(dog: Watchdog, share: float | None, waits: bool = False, heard_every: float = 1e9) -> float:
    """How long an engine lives that is heard of so often and uses that share of a processor; at most 1,000 s."""
    now = cpu = since = 0.0
    while now < 1000:
        now += dog.interval
        since += dog.interval
        cpu += (share or 0.0) * dog.interval
        if since >= heard_every:
            dog.heard()
            since = 0.0
        if dog.tick(now, None if share is None else (cpu, waits)):
            break
    return now


def test_R_02_one_that_does_nothing_is_ended_in_time() -> None:
    assert seconds_to_end(Watchdog(60), 0.0) == pytest.approx(60, abs=2)
    assert seconds_to_end(Watchdog(10), 0.0) == pytest.approx(10, abs=1)
    assert seconds_to_end(Watchdog(10), None) == pytest.approx(10, abs=1)


def test_R_03_one_in_a_long_step_is_given_longer_and_not_for_ever() -> None:
    for share, waits in ((1.0, False), (0.05, False), (0.0, True)):
        assert seconds_to_end(Watchdog(10), share, waits) == pytest.approx(10 * PATIENCE, abs=3)


def test_R_03_one_that_makes_steps_is_never_ended() -> None:
    assert seconds_to_end(Watchdog(10), 0.0, heard_every=9) >= 1000
    assert seconds_to_end(Watchdog(10), 1.0, heard_every=99) >= 1000


def test_without_a_timeout_nobody_is_ended() -> None:
    assert seconds_to_end(Watchdog(0), 0.0) >= 1000


def test_R_03_a_watcher_that_stood_still_itself_blames_nobody() -> None:
    dog = Watchdog(10)
    dog.tick(0.0, (0.0, False))
    assert not dog.tick(500.0, (0.0, False))
    assert dog.frozen <= 2 * dog.interval


def test_I_24_stalled_is_told_at_half_time_and_taken_back() -> None:
    dog = Watchdog(10)
    now = 0.0
    while dog.frozen <= 5:
        assert not dog.is_stalled
        now += dog.interval
        assert not dog.tick(now, (0.0, False))
    assert dog.is_stalled
    dog.heard()
    assert not dog.is_stalled
    assert dog.frozen == dog.silent == 0
