"""Engines that announce themselves, come and go, while streams run: the bits stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tests.engine.test_client import Answer, read, requests
from tests.fleet.engines.test_fleet import alone, core
from tests.support.remote import until

from headrace.engine.core import EngineCore
from headrace.engine.links import InprocLink, Link
from headrace.fleet.engines.client import Fleet
from headrace.ray.roster import LOST_S, Roster


class Engines:
    """A fleet without engines at first, and a clock. Each port is an engine's in this process."""

    def __init__(self, fingerprints: dict[int, str] | None = None) -> None:
        self.fleet = Fleet([])
        self.roster = Roster(self.fleet, self._link)
        self.now = 0.0
        self.links: list[InprocLink] = []
        self.builders: Iterator[Callable[[], EngineCore]] = iter(())
        self._fingerprints = fingerprints or {}

    def _link(self, host: str, port: int) -> Link:
        self.links.append(InprocLink(next(self.builders, core(self._fingerprints.get(port, "same")))))
        return self.links[-1]

    def announce(self, *names: str) -> None:
        for name in names:
            self.roster.announce(name, "host", ord(name), self.now)

    @property
    def num_up(self) -> int:
        return sum(each.is_alive for each in self.fleet.replicas)


def run(engines: Engines, work: Callable[[Engines], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        starting = asyncio.create_task(engines.fleet.start())
        await asyncio.sleep(0)
        assert not starting.done(), "without an engine it has not started"
        engines.announce("a")
        try:
            async with asyncio.timeout(60):
                await starting
                return await work(engines)
        finally:
            await engines.fleet.close()

    return asyncio.run(whole())


async def answers(fleet: Fleet, num: int, length: int) -> list[Answer]:
    streams = [fleet.submit([each]) for each in requests(num, length)]
    return [answer[0] for answer in await asyncio.gather(*map(read, streams))]


def test_engines_come_and_one_goes_while_streams_run() -> None:
    async def work(engines: Engines) -> list[Answer]:
        engines.announce("a", "b")
        await until(lambda: engines.num_up == 2)
        reading = asyncio.create_task(answers(engines.fleet, 12, 60))
        await until(lambda: all(each.entries for each in engines.fleet.replicas))
        assert engines.roster.withdraw("a")
        await until(lambda: not engines.roster.withdraw("a"))
        assert engines.num_up == 1
        demand = engines.roster.demand(engines.now)
        assert demand.num_replicas == 1
        assert demand.busy_replicas > 0
        result = await reading
        # A name that went may not come back; another may.
        engines.announce("c")
        await until(lambda: engines.num_up == 2)
        return result + await answers(engines.fleet, 4, 8)

    assert run(Engines(), work) == alone([*requests(12, 60), *requests(4, 8)])


def test_the_last_engine_that_computes_so_ends_its_streams_itself() -> None:
    async def work(engines: Engines) -> list[Answer]:
        reading = asyncio.create_task(answers(engines.fleet, 4, 60))
        await until(lambda: all(each.entries for each in engines.fleet.replicas))
        engines.announce("b")
        await until(lambda: engines.num_up == 2)
        engines.roster.withdraw("a")
        result = await reading
        await until(lambda: not engines.roster.withdraw("a"))
        return result

    assert run(Engines({ord("b"): "other"}), work) == alone(requests(4, 60))


def test_an_engine_goes_when_its_connection_is_lost_and_it_is_not_heard_of() -> None:
    async def work(engines: Engines) -> None:
        engines.announce("b")
        await until(lambda: engines.num_up == 2)
        engines.now += 2 * LOST_S
        engines.announce("a")
        assert not engines.roster.is_leaving("b"), "its connection lives"
        [lost] = [each for each in engines.fleet.replicas if each.link is engines.links[1]]
        lost.is_up = False
        engines.announce("a")
        await until(lambda: not engines.roster.withdraw("b"))
        assert engines.num_up == 1

    run(Engines(), work)


def test_an_engine_that_can_not_be_used_is_tried_again_later() -> None:
    async def work(engines: Engines) -> None:
        def build() -> Any:
            raise OSError("no such engine")

        engines.builders = iter([build])
        engines.announce("b")
        await until(lambda: engines.roster.is_unusable("b"))
        engines.announce("b")
        assert engines.num_up == 1, "not at once"
        engines.now += 2 * LOST_S
        engines.announce("b")
        engines.announce("b")
        await until(lambda: engines.num_up == 2)

    run(Engines(), work)


def test_an_engine_that_comes_before_the_server_starts_is_started_once() -> None:
    async def whole() -> list[Answer]:
        engines = Engines()
        engines.announce("a")
        num_starts, start = 0, engines.links[0].start

        async def counted(*arguments: Any) -> Any:
            nonlocal num_starts
            num_starts += 1
            return await start(*arguments)

        engines.links[0].start = counted  # type: ignore[method-assign]
        try:
            async with asyncio.timeout(60):
                await engines.fleet.start()
                assert num_starts == 1
                return await answers(engines.fleet, 2, 8)
        finally:
            await engines.fleet.close()

    assert len(asyncio.run(whole())) == 2
