"""R-10, I-18: a caller that sends much does not keep others waiting, and nobody is overtaken for ever."""

from __future__ import annotations

import random

import msgspec
import pytest

from headrace.core.options import SchedulerOptions
from headrace.core.queue import Ranks, WaitingQueue
from headrace.core.scheduler import Scheduler
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, StepResult


def request(name: str, tenant: str, work: int = 10, num_prompt: int = 3) -> Request:
    params = SamplingParams(seed=1, max_tokens=1)
    return Request(request_id=name, prompt_token_ids=[1] * num_prompt, params=params, tenant=tenant, work=work)


def make(policy: str, max_overtaking: int = 32) -> Scheduler:
    """One at a time, one step each."""
    return Scheduler(SchedulerOptions(
        num_blocks=64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, policy=policy,
        max_overtaking=max_overtaking, enable_prefix_caching=False,
    ))  # fmt: skip


def step(scheduler: Scheduler) -> list[str]:
    batch = scheduler.schedule()
    output = scheduler.commit(batch, StepResult(step_id=batch.step_id, token_ids=[5] * len(batch)))
    scheduler.check()
    return list(output.finished)


def order(scheduler: Scheduler, requests: list[Request]) -> list[str]:
    for one in requests:
        scheduler.add(one)
    served: list[str] = []
    while scheduler.has_work():
        served += step(scheduler)
    return served


FLOOD = [request(f"a{i}", "a") for i in range(50)]


def test_a_flood_by_one_tenant_delays_another_by_one_turn() -> None:
    served = order(make("fair"), [*FLOOD, request("b0", "b"), request("b1", "b")])
    assert served.index("b0") <= 2
    assert served.index("b1") <= 4
    assert sorted(served) == sorted([*(one.request_id for one in FLOOD), "b0", "b1"])


def test_control_first_come_first_served_does_not() -> None:
    served = order(make("fcfs"), [*FLOOD, request("b0", "b")])
    assert served.index("b0") == 50


def test_with_one_tenant_fair_is_the_order_of_arrival() -> None:
    assert order(make("fair"), FLOOD) == [one.request_id for one in FLOOD]


def test_shares_are_of_work_and_not_of_requests() -> None:
    """While both have some waiting, each gets half of the tokens, whatever the sizes of its requests."""
    noise = random.Random(0)
    many = [request(f"a{i}", "a", work=10) for i in range(400)]
    few = [request(f"b{i}", "b", work=noise.choice([40, 100])) for i in range(40)]
    works = {one.request_id: one.work for one in (*many, *few)}
    mixed = [*many, *few]
    noise.shuffle(mixed)
    done = {"a": 0, "b": 0}
    for name in order(make("fair", max_overtaking=10**6), mixed)[:150]:
        done[name[0]] += works[name]
        assert abs(done["a"] - done["b"]) <= 210
    assert min(done.values()) > 900


def test_I_18_nobody_is_overtaken_more_often_than_the_bound() -> None:
    """A request of one who has had much, and newcomers without end, each a tenant that has had nothing."""
    scheduler = make("fair", max_overtaking=5)
    for place in range(3):
        scheduler.add(request(f"a{place}", "a", work=10**6))
    served: list[str] = []
    for turn in range(40):
        scheduler.add(request(f"n{turn}", f"n{turn}", work=1))
        served += step(scheduler)
    later = [name for name in served[: served.index("a1")] if name != "a0"]
    assert len(later) <= 5 + 1


def test_control_without_ageing_it_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "count_overtaking", lambda self, by, passed_by: False)
    scheduler = make("fair", max_overtaking=5)
    for place in range(3):
        scheduler.add(request(f"a{place}", "a", work=10**6))
    served: list[str] = []
    for turn in range(40):
        scheduler.add(request(f"n{turn}", f"n{turn}", work=1))
        served += step(scheduler)
    assert "a1" not in served


def test_ranks_of_the_other_policies() -> None:
    last = float("inf")
    assert Ranks("fcfs").rank(request("x", "a"), last) == 0
    requests = Request(request_id="x", prompt_token_ids=[1], params=SamplingParams(), priority=-7)
    assert Ranks("priority").rank(requests, last) == -7


def test_who_comes_back_to_an_empty_queue_has_no_debts() -> None:
    ranks = Ranks("fair")
    for _ in range(100):
        ranks.rank(request("x", "a", work=1000), 0.0)
    first = ranks.rank(request("x", "a"), float("inf"))
    assert ranks.rank(request("y", "b"), first) == first


def test_a_refused_request_is_no_work_of_its_tenant() -> None:
    scheduler = make("fair")
    scheduler.add(request("b0", "b"))
    search = msgspec.structs.replace(request("x", "a", work=1000), beam=BeamSearchParams(beam_width=2))
    with pytest.raises(RequestError, match="beam_width"):
        scheduler.add(search)
    assert order(scheduler, [request("b1", "b"), request("a0", "a")]) == ["b0", "a0", "b1"]


def test_tenants_without_end_take_no_memory_without_end() -> None:
    ranks = Ranks("fair")
    least = ranks.rank(request("x", "a"), float("inf"))
    for number in range(20_000):
        least = ranks.rank(request("x", f"t{number}", work=1), least + 1)
    assert len(ranks._ends) < 10_000
