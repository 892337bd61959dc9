"""R-12: what may wait, by requests and by predicted work, and each caller's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.server import Live

from headrace.engine.admission import FIRST_MEAN, Admission
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import QueueFullError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request


def request(num_prompt: int, max_tokens: int, **more: object) -> Request:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    return Request(request_id="x", prompt_token_ids=[1] * num_prompt, params=params, **more)  # type: ignore[arg-type]


def fill(queue: Admission, name: str, work: int = 1, most: int = 10**6) -> int:
    """How many requests of one caller get in, one by one."""
    for number in range(most):
        try:
            queue.admit([work], name, 0.0)
        except QueueFullError:
            return number
        queue.enter(work, name)
    return most


def test_R_12_work_is_the_prompt_and_the_answer_that_is_to_be_expected() -> None:
    queue = Admission(100, 1000)
    assert queue.work_of(request(10, 20)) == 30
    assert queue.work_of(request(10, 10**6)) == 10 + FIRST_MEAN
    assert queue.work_of(request(10, 20, pooling="last")) == 10
    assert queue.work_of(request(10, 20, beam=BeamSearchParams(beam_width=4, max_tokens=20))) == 90
    for _ in range(1000):
        queue.ended(40)
    assert queue.work_of(request(10, 10**6)) == pytest.approx(50, abs=1)


@pytest.mark.parametrize(("reqs", "tokens", "work", "fit"), [(10, 1000, 1, 10), (1000, 95, 10, 9), (5, 10, 100, 1)])
def test_R_12_both_bounds_hold(reqs: int, tokens: int, work: int, fit: int) -> None:
    queue = Admission(reqs, tokens)
    assert fill(queue, "", work) == fit
    assert queue.num_waiting == fit
    for _ in range(fit):
        queue.leave(work, "")
    assert (queue.num_waiting, queue.num_waiting_tokens) == (0, 0)
    assert fill(queue, "", work) == fit
    with pytest.raises(RequestError, match="answers in one call"):
        queue.admit([1] * (reqs + 1), "", 0.0)


def test_R_12_a_caller_alone_may_fill_the_queue() -> None:
    assert fill(Admission(100, 10**6), "one key") == 100


@pytest.mark.parametrize("num_callers", [2, 3, 6])
def test_R_10_each_callers_share_is_at_least_what_is_left(num_callers: int) -> None:
    """A flood by one leaves room for each of the others, who come later; nobody is left with nothing."""
    queue = Admission(1000, 10**6)
    names = [f"key {place}" for place in range(num_callers)]
    for name in names:
        queue.admit([1], name, 0.0)
        queue.enter(1, name)
    num_admitted = [1 + fill(queue, name) for name in names]
    assert num_admitted[0] <= 500
    for place, name in enumerate(names):
        # Each later one gets half of what the ones before have left, and never less than that.
        assert num_admitted[place] >= 1000 >> (place + 2), (name, num_admitted)
    assert sum(num_admitted) <= 1000
    # As soon as some of the flood is served, its share goes to the next caller.
    for _ in range(num_admitted[0]):
        queue.leave(1, names[0], 1.0)
    assert fill(queue, names[-1]) >= num_admitted[-1]


def test_R_10_the_share_counts_work_too() -> None:
    queue = Admission(10**6, 10_000)
    for name in ("a", "b"):
        queue.admit([10], name, 0.0)
        queue.enter(10, name)
    assert 10 * fill(queue, "a", 10) <= 5000
    assert 10 * fill(queue, "b", 10) >= 2000


def test_control_without_shares_one_caller_has_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Admission(1000, 10**6)
    # All names share one bound.
    monkeypatch.setattr("headrace.engine.admission.MAX_NAMES", 0)
    assert fill(queue, "a") == 1000
    assert fill(queue, "b") == 0


def test_R_12_whoever_is_refused_is_told_when_to_come_back() -> None:
    queue = Admission(10, 10**6)
    fill(queue, "", 50)
    with pytest.raises(QueueFullError) as unknown:
        queue.admit([50], "", 0.0)
    assert unknown.value.retry_after == 10
    # Two a second were begun with lately: the ten take five seconds.
    for turn in range(20):
        queue.enter(50, "")
        queue.leave(50, "", turn / 2)
    with pytest.raises(QueueFullError) as known:
        queue.admit([50], "", 10.0)
    assert 4 <= known.value.retry_after <= 6
    with pytest.raises(QueueFullError) as late:
        queue.admit([50], "", 1000.0)
    assert late.value.retry_after == 10


def test_R_21_starts_are_forgotten_where_nobody_is_turned_away() -> None:
    door = Admission(10, 1000)
    for second in range(1000):
        door.enter(5, "")
        door.leave(5, "", float(second))
    assert len(door._starts) <= 31


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_R_12_a_call_is_admitted_once(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Before it is tokenised there is a look whether so many requests fit; then all of them are admitted together."""
    looks: list[int] = []
    works: list[int] = []
    queue = live.client.admission
    check_room, admit = queue.check_room, queue.admit

    def look(num: int, name: str, now: float) -> None:
        looks.append(num)
        monkeypatch.setattr(queue, "admit", admit)
        check_room(num, name, now)
        monkeypatch.setattr(queue, "admit", counted)

    def counted(requests: Sequence[int], name: str, now: float) -> None:
        works.append(len(requests))
        admit(requests, name, now)

    monkeypatch.setattr(queue, "check_room", look)
    monkeypatch.setattr(queue, "admit", counted)
    assert live.post(path, body).status_code == 200
    num = len(body.get("prompt", "a")) * body.get("n", 1)
    assert (looks, works) == ([num], [num])
