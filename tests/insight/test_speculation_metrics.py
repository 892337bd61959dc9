"""The counters of speculation as /metrics shows them, over several lives of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.engine.open_requests import summed
from headrace.insight.metrics import ServerMetrics
from headrace.protocol.step import Stats

PAST = Stats(num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4, num_accepted_per_pos=[2, 1, 1], num_running=5)
NOW = Stats(num_drafts=2, num_draft_tokens=4, num_accepted_tokens=1, num_accepted_per_pos=[1], num_running=1)


def test_counters_of_speculation_survive_a_restart() -> None:
    total = summed(PAST, NOW)
    assert (total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens) == (5, 13, 5)
    assert total.num_accepted_per_pos == [3, 1, 1]
    assert total.num_running == 1
    assert summed(NOW, PAST).num_accepted_per_pos == [3, 1, 1]


def test_metrics_tell_them_by_vllms_names() -> None:
    client: Any = SimpleNamespace(
        stats=NOW,
        replicas=[],
        total=summed(PAST, NOW),
        is_alive=True,
        is_started=False,
        num_unfinished=0,
        num_restarts=1,
        num_expired=0,
        num_quarantined=0,
        is_fleet=False,
    )
    decoded = ServerMetrics(client, "m").render().decode()
    for line in (
        'headrace:spec_decode_num_drafts_total{engine="0",model_name="m"} 5.0',
        'headrace:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 13.0',
        'headrace:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 5.0',
        'headrace:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 3.0',
        'headrace:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0',
    ):
        assert line in decoded
