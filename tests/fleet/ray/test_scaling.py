"""How many engines there should be, from the work that waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.admission import Admission
from headrace.ray.scaling import Demand, replicas_for, stats, wanted


def context(reports: dict[str, float | None] | None, low: int = 1, high: int = 8) -> Any:
    metrics = None if reports is None else {"wanted_replicas": reports}
    return SimpleNamespace(
        aggregated_metrics=metrics,
        target_num_replicas=2,
        capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high,
    )


@pytest.mark.parametrize(
    ("demand", "number"),
    [
        (Demand(0.0, 0.0, 3), 0.0),
        (Demand(0.0, 2.5, 3), 2.5),
        # Two engines would take 6 s to begin what waits: six such could do it in 2 s.
        (Demand(6.0, 0.0, 2), 6.0),
        (Demand(6.0, 2.0, 2), 8.0),
    ],
)
def test_engines_that_are_busy_and_those_that_the_queue_needs(demand: Demand, number: float) -> None:
    assert wanted(demand, 2.0) == number
    assert stats(demand, 2.0)["wanted_replicas"] == number


@pytest.mark.parametrize(
    ("reports", "number"),
    [
        ({"a": 2.1, "b": 2.3}, 3),
        ({"a": 2.0 + 1e-9, "b": None}, 2),
        ({"a": 0.0}, 1),
        ({"a": 50.0}, 8),
        ({}, 2),
        (None, 2),
    ],
)
def test_the_policy_takes_the_mean_of_the_reports_and_changes_nothing_without_any(
    reports: dict[str, float | None] | None, number: int
) -> None:
    assert replicas_for(context(reports)) == (number, {})


def test_seconds_of_queued_work_are_those_that_the_last_one_will_wait() -> None:
    admission = Admission(100, 10_000)
    for _ in range(4):
        admission.enter(100, "")
    assert admission.seconds_to_begin(10.0) == 0.0, "nothing was begun yet: no rate is known"
    admission.leave(100, "", 10.0)
    admission.leave(100, "", 14.0)
    # 200 tokens in 4 s, and 200 wait.
    assert admission.seconds_to_begin(14.0) == pytest.approx(4.0)
    assert admission.seconds_to_begin(50.0) == 0.0, "what was begun long ago does not count"
    admission.leave(200, "")
    assert admission.seconds_to_begin(14.0) == 0.0
