"""An engine that is held waits between two steps, computes as many as it is asked for, and is never held for long."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from tests.support.server import HTTP, Live, child, inproc
from tests.support.serving import gauge

from headrace.engine.client import EngineClient
from headrace.engine.holding import BEAT_S, LEASE_S, NOT_HELD, Hold, HoldSteps
from headrace.protocol import frames
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

BODY = {"prompt": "x", "max_tokens": 40, "seed": 1, "ignore_eos": True}


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_hold_counts_steps_and_ends_by_itself() -> None:
    clock = Clock()
    hold = Hold(clock)
    assert not hold.must_wait
    assert hold.set(HoldSteps(2)) == 2
    assert not hold.must_wait
    hold.stepped()
    # To renew it adds no steps and takes none away.
    assert hold.set(HoldSteps(0)) == 1
    hold.stepped()
    assert hold.must_wait
    clock.now += LEASE_S - 1
    assert hold.must_wait
    clock.now += 1
    assert not hold.must_wait
    # Steps of a hold that is over do not count in the next one.
    hold.set(HoldSteps(5))
    clock.now += LEASE_S
    assert hold.set(HoldSteps(0)) == 0
    assert hold.set(HoldSteps(None)) == NOT_HELD
    assert not hold.must_wait


def test_while_it_waits_messages_are_read_and_the_gauges_go_on() -> None:
    clock = Clock()
    hold = Hold(clock)
    hold.set(HoldSteps(0))
    num = 0

    def receive(waits: bool) -> list[frames.ToEngine] | None:
        nonlocal num
        assert not waits
        num += 1
        clock.now += 0.3
        return [frames.Shutdown()] if num == 2 else []

    assert hold.wait(receive) == [frames.Shutdown()]
    num = 2
    begin = clock.now
    assert hold.wait(receive) == []
    assert BEAT_S <= clock.now - begin < BEAT_S + 0.4
    assert hold.wait(lambda waits: None) is None


def order(live: Live, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = HTTP.post(f"{live.url}/inspect/hold", json=body).json()
    return reply


@pytest.mark.parametrize("make", [inproc, child], ids=["thread", "process"])
def test_steps_are_computed_when_they_are_asked_for(make: Any, tokenizer: Tokenizer) -> None:
    client: EngineClient = make()
    # A watchdog that is impatient: a held engine is not frozen.
    for replica in client.replicas:
        replica.watchdog.timeout = 3.0
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        free = live.post("/v1/completions", BODY).json()["choices"][0]["text"]
        assert order(live, num_steps=0) == {"is_held": True, "num_steps": 0}
        before = steps(live)
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(live.post("/v1/completions", BODY)))
        thread.start()
        while HTTP.get(f"{live.url}/load").json()["server_load"] < 1:
            time.sleep(0.01)
        for num, total in ((3, 3), (2, 5)):
            order(live, num_steps=num)
            while order(live, num_steps=0)["num_steps"]:
                time.sleep(0.01)
            assert steps(live) == before + total
        time.sleep(0.2)
        assert steps(live) == before + 5
        assert not replies
        assert order(live) == {"is_held": False, "num_steps": 0}
        thread.join()
        assert replies[0].json()["choices"][0]["text"] == free
        assert client.num_restarts == 0


def steps(live: Live) -> int:
    return int(gauge(live.url, "headrace:num_steps_total"))


def test_the_number_of_steps_is_bounded(live: Live) -> None:
    for value in (-1, 10_001, "x"):
        reply = HTTP.post(f"{live.url}/inspect/hold", json={"num_steps": value})
        assert reply.status_code == 400
        assert "num_steps" in reply.json()["error"]["message"]
