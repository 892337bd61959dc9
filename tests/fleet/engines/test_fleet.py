"""Several engines behind one client: streams that move, requests that kill, fingerprints, and callers in turn."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.engine.test_client import Answer, read, request, requests
from tests.engine.test_quarantine import outcome
from tests.support import deadly, fake
from tests.support.server import inproc

from headrace.backends.native import require_native
from headrace.engine import tenants
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.engine.links import ENGINE_COMMAND, InprocLink, Link, ProcessLink
from headrace.engine.open_requests import OpenRequest, PoisonedRequestError
from headrace.engine.replica import Replica
from headrace.engine.tenants import Tenant
from headrace.fleet.engines.client import Fleet
from headrace.protocol import frames
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import EngineDeadError, RequestError
from headrace.protocol.kinds import ROUTERS
from headrace.protocol.step import Request, StepOutput

ISAS = require_native().isas()


def processes(num: int = 3, delay: float = 0.002, command: Any = None, **options: Any) -> Fleet:
    config = EngineConfig(model="fake", **options.pop("config", {}))
    links = [ProcessLink(config, (command or fake.command)(delay)) for _ in range(num)]
    return Fleet(links, **{"max_restarts": 5} | options)


def threads(cores: list[Callable[[], EngineCore]], **options: Any) -> Fleet:
    return Fleet([InprocLink(build) for build in cores], **options)


def core(fingerprint: str = "same", delay: float = 0.002, **config: Any) -> Callable[[], EngineCore]:
    def build() -> EngineCore:
        result = fake.build(EngineConfig(model="fake", **config), delay)
        result.fingerprint = lambda: fingerprint
        return result

    return build


def run(fleet: Fleet, work: Callable[[Fleet], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with asyncio.timeout(60):
            await fleet.start()
        try:
            async with asyncio.timeout(60):
                return await work(fleet)
        finally:
            await fleet.close()

    return asyncio.run(whole())


async def all_of(
    fleet: Fleet, expected: list[Request], at: dict[int, Callable[[], object]] | None = None
) -> list[Answer]:
    streams = [fleet.submit([each]) for each in expected]
    answers = await asyncio.gather(*(read(stream, at if not place else None) for place, stream in enumerate(streams)))
    return [answer[0] for answer in answers]


def alone(expected: list[Request]) -> list[Answer]:
    """What one engine gives that nobody disturbs."""

    async def whole() -> list[Answer]:
        client = inproc()
        await client.start()
        try:
            return [(await read(client.submit([each])))[0] for each in expected]
        finally:
            await client.close()

    return asyncio.run(whole())


def kill(fleet: Fleet, index: int, sign: int = signal.SIGKILL) -> None:
    pid = fleet.replicas[index].link.pid
    assert pid is not None
    os.kill(pid, sign)


def test_streams_of_a_killed_replica_go_on_in_others() -> None:
    expected = requests(24, 60)
    fleet = processes()

    async def work(fleet: Fleet) -> list[Answer]:
        return await all_of(fleet, expected, {20: lambda: kill(fleet, 0)})

    assert run(fleet, work) == alone(expected)
    assert fleet.num_moved >= 4
    assert fleet.num_unfinished == fleet.num_waiting == 0


def test_streams_of_a_stopped_replica_go_on_in_others() -> None:
    expected = requests(12, 60)
    fleet = processes(2, watchdog_timeout=1.0)

    async def work(fleet: Fleet) -> list[Answer]:
        return await all_of(fleet, expected, {20: lambda: kill(fleet, 0, signal.SIGSTOP)})

    assert run(fleet, work) == alone(expected)
    assert fleet.num_moved >= 4


def test_a_drained_replica_gets_no_more() -> None:
    expected = requests(12, 40)
    fleet = threads([core(), core()])

    async def work(fleet: Fleet) -> list[Answer]:
        actual = await all_of(fleet, expected, {10: lambda: fleet.drain(0)})
        assert not fleet.replicas[0].entries
        more = await all_of(fleet, requests(4))
        assert fleet.router.loads[0].num_open == 0
        return actual + more

    assert run(fleet, work) == alone(expected + requests(4))
    assert fleet.num_moved >= 4


def test_one_that_is_left_serves_and_none_is_the_end() -> None:
    fleet = processes(2, max_restarts=0)
    expected = requests(6, 60)

    async def work(fleet: Fleet) -> list[Answer]:
        actual = await all_of(fleet, expected, {20: lambda: kill(fleet, 1)})
        assert fleet.is_alive
        kill(fleet, 0)
        await asyncio.wait_for(fleet.dead.wait(), 20)
        with pytest.raises(EngineDeadError):
            fleet.submit(requests(1))
        return actual

    assert run(fleet, work) == alone(expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [deadly.SEGV, deadly.KILL])
def test_a_request_that_kills_is_refused_after_as_many_deaths_wherever_they_were(kind: int) -> None:
    """With one engine these are two deaths, or three by SIGKILL, after one that could not be blamed on anything."""
    fleet = processes(3, command=deadly.command, max_restarts=1)
    innocent = requests(9, 60)
    guilty = request([kind, 7], max_tokens=40)

    async def work(fleet: Fleet) -> list[object]:
        return list(await asyncio.gather(*(outcome(fleet, each) for each in [*innocent, guilty])))

    *result, end = run(fleet, work)
    assert end[0] is PoisonedRequestError
    assert result == alone(innocent)
    assert fleet.num_quarantined == 1
    deaths = 4 if kind == deadly.KILL else 3
    assert f"died {deaths} times" in end[2] or f"died {deaths - 1} times" in end[2]


def test_answers_go_on_only_with_the_same_fingerprint() -> None:
    expected = requests(8, 40)
    fleet = threads([core("a"), core("b"), core("a")], router="round-robin")

    async def work(fleet: Fleet) -> list[Answer]:
        where: dict[str, set[str]] = {}

        def note(replica: Replica, output: StepOutput) -> None:
            for each in set(output.request_ids) & replica.entries.keys():
                where.setdefault(each, set()).add(replica.fingerprint)

        listen(fleet, note)
        actual = await all_of(fleet, expected, {10: lambda: fleet.drain(0)})
        assert fleet.num_moved > 0
        assert all(len(each) == 1 for each in where.values())
        return actual

    assert run(fleet, work) == alone(expected)


def listen(fleet: Fleet, on_output: Callable[[Replica, StepOutput], object]) -> None:
    original = fleet.on_message

    def noted(replica: Replica, message: frames.FromEngine) -> None:
        if isinstance(message, frames.Output):
            on_output(replica, message.output)
        original(replica, message)

    fleet.on_message = noted  # type: ignore[method-assign]


def test_fingerprints_that_are_skipped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(fleet: Fleet, entry: OpenRequest, usable: list[Replica]) -> list[int]:
        return [each.index for each in usable if not each.is_leaving]

    monkeypatch.setattr(Fleet, "_candidates", candidates)
    with pytest.raises(AssertionError):
        test_answers_go_on_only_with_the_same_fingerprint()


def test_an_answer_that_no_replica_can_go_on_with_is_an_error() -> None:
    fleet = threads([core("a"), core("b")], router="round-robin")

    async def work(fleet: Fleet) -> None:
        one = fleet.submit([request(max_tokens=200)])
        await anext(one)
        fleet.replicas[0].dead = EngineDeadError("gone")
        fleet.replicas[0].fingerprint = "gone"
        fleet.on_given_up(fleet.replicas[0], "gone")
        with pytest.raises(EngineDeadError, match="no engine is left"):
            await read(one)

    run(fleet, work)


def test_a_caller_that_floods_delays_another_by_one_turn() -> None:
    """Each replica runs two at once. Of the flood six run, and the other caller's request begins in place of one."""
    fleet = threads([core(max_num_seqs=2, scheduling_policy="fair") for _ in range(3)], router="least-work")

    async def work(fleet: Fleet) -> int:
        with tenants.acting_as(Tenant("flood")):
            flood = fleet.submit([request([1, 2, i], max_tokens=40) for i in range(60)])
        while fleet.stats.num_running < 6:
            await asyncio.sleep(0.01)
        ended: list[str] = []
        listen(fleet, lambda replica, output: ended.extend(output.finished))
        with tenants.acting_as(Tenant("other")):
            other = fleet.submit([request([9, 9], max_tokens=3)])
        await anext(other)
        num_ended = len(ended)
        other.close()
        flood.close()
        return num_ended

    # The six that ran may have ended meanwhile; none that waited ended before it.
    assert run(fleet, work) <= 6


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_share_out_what_comes(router: str) -> None:
    fleet = threads([core(), core(), core()], router=router)
    responses = [request([i, 2 * i, 7, i % 3], seed=i) for i in range(1, 25)]
    used: set[int] = set()

    async def work(fleet: Fleet) -> list[Answer]:
        listen(fleet, lambda replica, output: used.add(replica.index) if output.request_ids else None)
        return await all_of(fleet, responses)

    assert run(fleet, work) == alone(responses)
    assert used == {0, 1, 2}


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    fleet = threads([core(delay=0.0), core(delay=0.0), core(delay=0.0)], router="prefix")
    prompts = [[kind] * 320 for kind in range(1, 4)]

    async def work(fleet: Fleet) -> int:
        for _ in range(3):
            for prompt in prompts:
                await all_of(fleet, [request(prompt, max_tokens=1)])
        for replica in fleet.replicas:
            replica.watching.watch(True)
        assert len(fleet.router.index) == 60
        fleet.reset_prefix_cache()
        await all_of(fleet, [request([9] * 16, max_tokens=1)])
        return fleet.total.prefix_cache_hits

    assert run(fleet, work) == 6 * 319


def test_the_numbers_are_those_that_every_replica_can_serve() -> None:
    fleet = threads([core(max_model_len=64), core(max_model_len=32)])

    async def work(fleet: Fleet) -> None:
        assert fleet.info.max_model_len == 32
        with pytest.raises(RequestError):
            fleet.verify([request([1] * 40)])
        await all_of(fleet, [request(max_tokens=2)])
        assert fleet.total.num_generated_tokens == 2
        assert fleet.stats.num_blocks == 2048

    run(fleet, work)


def builtin() -> EngineCore:
    return build_engine(EngineConfig(num_threads=1, num_gpu_blocks_override=64, skip_tokenizer_init=True))


def moved_with_state() -> tuple[list[Answer], int]:
    """The answer of one that samples with mirostat, which moves after 8 tokens and again after 16."""
    fleet = threads([builtin, builtin])

    def move() -> None:
        index = next(replica.index for replica in fleet.replicas if replica.entries)
        fleet.drain(index)
        fleet.replicas[index].is_leaving = False

    one = request([5, 6, 7], max_tokens=32, temperature=1.0, mirostat=2, logprobs=1)
    return run(fleet, lambda fleet: all_of(fleet, [one], {8: move})), fleet.num_moved


def test_a_sampler_with_a_state_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result, num_moved = moved_with_state()
    assert num_moved == 1

    async def whole() -> list[Answer]:
        fleet = threads([builtin])
        await fleet.start()
        try:
            return await all_of(fleet, [request([5, 6, 7], max_tokens=32, temperature=1.0, mirostat=2, logprobs=1)])
        finally:
            await fleet.close()

    still = asyncio.run(whole())
    assert result == still
    # A move that forgets the state is noticed.
    resumed = OpenRequest.resumed

    def forgetful(entry: OpenRequest) -> Request:
        entry.state = None
        return resumed(entry)

    monkeypatch.setattr(OpenRequest, "resumed", forgetful)
    assert moved_with_state()[0] != still


def test_any_link_will_do() -> None:
    links: list[Link] = [InprocLink(core()), ProcessLink(EngineConfig(model="fake"), fake.command(0.0))]
    fleet = Fleet(links)
    expected = requests(8)
    assert run(fleet, lambda fleet: all_of(fleet, expected)) == alone(expected)


@pytest.mark.slow
@pytest.mark.skipif(len(ISAS) < 2, reason="the machine has one instruction set")
def test_streams_move_between_instruction_sets_with_the_same_bits() -> None:
    """A replica for each of the machine's; the first of them, scalar, is killed."""
    config = EngineConfig(num_threads=1, num_gpu_blocks_override=256, skip_tokenizer_init=True)
    commands = [("env", f"HEADRACE_ISA={isa}", *ENGINE_COMMAND) for isa in ISAS]
    options = {"temperature": 1.0, "max_tokens": 60, "logprobs": 2}
    responses = [request([5, 6, i], seed=i, **options | ({"mirostat": 2} if i % 3 else {})) for i in range(12)]

    def fleet(commands: list[tuple[str, ...]]) -> Fleet:
        return Fleet([ProcessLink(config, command) for command in commands], router="round-robin", max_restarts=3)

    still = run(fleet([ENGINE_COMMAND]), lambda one: all_of(one, responses))
    three = fleet(commands)
    actual = run(three, lambda one: all_of(one, responses, {10: lambda: kill(three, 0)}))
    assert three.num_moved >= len(responses) // len(ISAS)
    assert actual == still
