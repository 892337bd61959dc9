"""A request that kills the engine is found, failed alone and with a reason; all others give the bits that they would
have given. Deaths from outside are nobody's fault, however many."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
from tests.engine.test_client import pid_of, read, request, requests, run, undisturbed
from tests.support import deadly
from tests.support.deadly import FREEZE, KILL, RAISE, SEGV

from headrace.engine import open_requests
from headrace.engine.client import EngineClient
from headrace.engine.links import ProcessLink
from headrace.engine.open_requests import PoisonedRequestError
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import EngineDeadError, HeadraceError
from headrace.protocol.step import Request
from headrace.protocol.watchdog import Watchdog


def mortal(max_restarts: int = 5, delay: float = 0.002, **config: int) -> EngineClient:
    link = ProcessLink(EngineConfig(model="fake", **config), deadly.command(delay))
    client = EngineClient(link, max_restarts=max_restarts)
    client.replicas[0].watchdog = Watchdog(1.5)
    return client


async def outcome(client: EngineClient, one: Request) -> object:
    try:
        return (await read(client.submit([one])))[0]
    except HeadraceError as error:
        return type(error), error.code, str(error)


async def all_of(client: EngineClient, result: list[Request]) -> list[object]:
    return list(await asyncio.gather(*(outcome(client, one) for one in result)))


def check(actual: list[Request], result: object, guilty: int) -> None:
    assert isinstance(result, list)
    expected = undisturbed([one for place, one in enumerate(actual) if place != guilty])
    assert isinstance(expected, dict)
    kind, code, message = result[guilty]
    assert (kind, code) == (PoisonedRequestError, "request_killed_engine")
    assert "the engine died" in message
    assert [answer for place, answer in enumerate(result) if place != guilty] == list(expected.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "after", "most_deaths"), [(KILL, 7, 4), (SEGV, 0, 3), (SEGV, 7, 3), (RAISE, 0, 3), (FREEZE, 7, 3)]
)
def test_a_request_that_kills_the_engine_is_failed_alone(
    kind: int, after: int, most_deaths: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In its first step, or in mid-answer. One death among others, and as many as its manner demands alone."""
    result = requests(8)
    result[4] = request([kind, after, 5], seed=4, max_tokens=20, logprobs=1, prompt_logprobs=0)
    client = mortal()
    actual = run(client, lambda client: all_of(client, result))
    check(result, actual, 4)
    assert client.num_restarts <= most_deaths
    assert client.num_quarantined == 1
    # Its deaths are not held against the engine.
    assert not client.replicas[0].deaths
    # S-22: the log has the places and the kind of the error, and nothing that it quotes.
    text = capfd.readouterr().err + caplog.text
    assert deadly.CANARY not in text
    assert ("in die" in text and "RuntimeError" in text) or kind != RAISE


@pytest.mark.parametrize("width", [1, 2])
def test_quarantine_works_where_few_run_at_once(width: int) -> None:
    result = requests(5)
    result[2] = request([SEGV, 3, 5], seed=4, max_tokens=20, logprobs=1, prompt_logprobs=0)
    actual = run(mortal(max_num_seqs=width), lambda client: all_of(client, result))
    check(result, actual, 2)


def test_one_after_the_other_every_poison_is_found() -> None:
    async def work(client: EngineClient) -> None:
        for turn in range(3):
            result = [request([RAISE, 2, turn], max_tokens=9), request([1, 2, turn], max_tokens=9)]
            guilty, innocent = await all_of(client, result)
            assert isinstance(guilty, tuple)
            assert guilty[0] is PoisonedRequestError
            assert isinstance(innocent, tuple)
            assert len(innocent[0]) == 9

    client = mortal(max_restarts=3)
    run(client, work)
    assert client.num_restarts > 3


def test_an_engine_that_every_request_kills_is_given_up() -> None:
    """Refunds end where nobody is served in between: then it is the engine, and the server should say so."""

    async def work(client: EngineClient) -> list[object]:
        result = []
        for turn in range(10):
            result.append(await outcome(client, request([SEGV, 0, turn])))
            if client.dead.is_set():
                break
        return result

    client = mortal(max_restarts=2)
    result = run(client, work)
    assert isinstance(result, list)
    assert client.dead.is_set()
    assert result[-1][0] is EngineDeadError


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
def test_kills_from_outside_convict_nobody(seed: int) -> None:
    """At any moment, also while requests go to a new engine one by one."""
    responses = [request([1, 2, i], seed=i, logprobs=1, max_tokens=120) for i in range(12)]
    client = mortal(max_restarts=1000, delay=0.01)
    noise = random.Random(seed)

    async def work(client: EngineClient) -> object:
        async def kill() -> None:
            for _ in range(5):
                while not client.is_alive:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(noise.choice([0.0, 0.004, 0.02, 0.1]))
                os.kill(pid_of(client), signal.SIGKILL)
                while client.is_alive:
                    await asyncio.sleep(0.001)

        killer = asyncio.create_task(kill())
        answers = await read(client.submit(responses))
        killer.cancel()
        return answers

    assert run(client, work) == undisturbed(responses)
    assert client.num_restarts >= 3


def test_control_without_the_quarantine_one_request_takes_all_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "STRIKES", 1000)
    result = requests(4)
    result[1] = request([SEGV, 2, 5])
    actual = run(mortal(max_restarts=3), lambda client: all_of(client, result))
    assert isinstance(actual, list)
    assert EngineDeadError in [answer[0] for answer in actual]
