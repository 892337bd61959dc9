"""`Explainers`: what is kept of the calls of models that are unloaded."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry

from headrace.core.journal import Arrival
from headrace.insight.explainer import Calls, Explainer, Explainers
from headrace.insight.lives import Life, Lives
from headrace.insight.observer import Counts


def calls(*names: str) -> Calls:
    """Ended requests with these ids."""
    lives = Lives()
    for seq_id, name in enumerate(names):
        arrival = Arrival(seq_id=seq_id, request_id=name, num_prompt=1, num_known=1, times=[0.0] * 4)
        lives.ended[name] = Life(arrival)
    return Calls(lives, None)


def test_the_last_requests_of_unloaded_models_are_kept() -> None:
    explainers = Explainers(max_lives=3)
    nothing: Any = None
    counts = Counts(CollectorRegistry(), "m")
    explainer = Explainer(counts, counts, None, lambda: nothing)
    explainers.add(explainer)
    explainer.lives.ended.update(calls("z").lives.ended)
    for model_calls in (calls("a", "b"), calls(), calls("c", "d")):
        explainers.retire(cast(Explainer, object()), model_calls)
    assert [len(explainers.of_call(name)) for name in "abcdz"] == [0, 1, 1, 1, 1]
    explainers.retire(explainer, explainer.calls)
    assert [len(explainers.of_call(name)) for name in "abcdz"] == [0, 0, 1, 1, 1]
