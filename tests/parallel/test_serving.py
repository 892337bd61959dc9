"""A real server whose engine is a group of ranks: ranks end in mid-answer, and every stream has the bits it would have.

A slice of the campaign in tests/campaigns/ranks.py, on two layers of the built-in model.
"""

from __future__ import annotations

import json

import pytest
from tests.campaigns import ranks
from tests.support.shallow import shallow

MODEL = (shallow(2), "--served-model-name", "builtin")


def test_streams_survive_the_death_of_a_rank() -> None:
    report = ranks.run(2, 0, seed=1, timeout=6.0, num_streams=8, max_tokens=48, arguments=MODEL)
    assert not report["problems"], json.dumps(report["problems"][:3], indent=1)
    assert report["counts"]["faults: rank-kill"] >= 1
    assert report["restarts"] >= 1


def test_streams_survive_the_death_of_a_stage() -> None:
    report = ranks.run(2, 1, seed=1, timeout=6.0, num_streams=8, max_tokens=48, arguments=MODEL, kind="pipeline")
    assert not report["problems"], json.dumps(report["problems"][:3], indent=1)
    assert report["counts"]["faults: rank-kill"] >= 1
    assert report["counts"]["faults: rank-stop"] >= 1
    assert report["restarts"] >= 2


@pytest.mark.slow
def test_streams_survive_ranks_that_stand_still() -> None:
    report = ranks.run(2, 4, seed=2, timeout=6.0, num_streams=16, max_tokens=48, arguments=MODEL)
    assert not report["problems"], json.dumps(report["problems"][:3], indent=1)
    assert report["counts"]["faults: rank-stop"] >= 2


def test_control_what_is_noticed_late_is_a_problem() -> None:
    assert ranks.late({"rank-kill": 0.5, "rank-stop": 14.0, "stop": 14.9}, 10.0) == []
    assert ranks.late({"rank-kill": 1.5}, 10.0) == ["rank-kill: noticed after 1.5 s, at most 1.0"]
    assert len(ranks.late({"kill": 2.0, "stop": 15.1}, 10.0)) == 2
