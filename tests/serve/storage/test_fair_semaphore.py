"""Permits are shared among holders, and released by a cancelled line."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from headrace.engine.tenants import Tenant, acting_as
from headrace.serve.storage import fair_semaphore
from headrace.serve.storage.fair_semaphore import FairSemaphore
from headrace.serve.storage.writers import Writers


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Lines:
    """Lines of holders that hold their permits until they are ended."""

    def __init__(self, pool: FairSemaphore) -> None:
        self.pool, self.first_holders, self.open = pool, "", dict[str, list[asyncio.Event]]()
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, holder: str, number: int) -> None:
        with acting_as(Tenant(holder)):
            self.tasks += [asyncio.ensure_future(self._run(holder)) for _ in range(number)]

    async def _run(self, holder: str) -> None:
        async with self.pool.permit():
            self.first_holders += holder
            self.open.setdefault(holder, []).append(end := asyncio.Event())
            await end.wait()

    async def end(self, holder: str) -> None:
        self.open[holder].pop(0).set()
        await settle()


async def begun_with(pool: FairSemaphore) -> str:
    """Alice has lines in plenty when Bob and Carol come with a few."""
    lines = Lines(pool)
    lines.add("a", 8)
    await settle()
    lines.add("b", 2)
    lines.add("c", 2)
    await settle()
    for holder in "aaabcbc":
        if lines.open.get(holder):
            await lines.end(holder)
    for task in lines.tasks:
        task.cancel()
    await asyncio.gather(*lines.tasks, return_exceptions=True)
    return lines.first_holders


def test_S_39_a_free_permit_goes_to_the_holder_with_the_fewest() -> None:
    assert asyncio.run(begun_with(FairSemaphore(3, lambda: 0))) == "aaabcabcaa"


def test_S_39_control_permits_in_order_of_arrival_would_starve_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairSemaphore, "_claim", lambda self, place: place)
    assert asyncio.run(begun_with(FairSemaphore(3, lambda: 0))).startswith("aaaaaa")


def test_a_cancelled_line_releases_its_permit() -> None:
    async def main() -> None:
        lines = Lines(FairSemaphore(1, lambda: 0))
        lines.add("a", 3)
        await settle()
        lines.tasks[1].cancel()  # it waits
        lines.tasks[0].cancel()  # it has the permit
        await settle()
        assert lines.first_holders == "aa"
        lines.tasks[2].cancel()
        await asyncio.gather(*lines.tasks, return_exceptions=True)
        # Nobody has the permit any more, and nobody waits for it.
        async with asyncio.timeout(5), lines.pool.permit():
            pass

    asyncio.run(main())


def test_no_line_starts_beside_others_unless_none_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_semaphore, "LOOK_AGAIN_S", 0.001)
    num_others = 1

    async def main() -> None:
        nonlocal num_others
        lines = Lines(FairSemaphore(3, lambda: num_others))
        lines.add("a", 3)
        await settle()
        assert lines.first_holders == "a"
        num_others = 0
        while lines.first_holders != "aaa":
            await asyncio.sleep(0.001)
        for _ in range(3):
            await lines.end("a")

    asyncio.run(main())


def test_storage_calls_of_one_holder_do_not_overlap_and_run_to_their_ends() -> None:
    async def main() -> None:
        writers, running, ended = Writers(), 0, 0
        release = threading.Event()

        def call() -> None:
            nonlocal running, ended
            running += 1
            assert running == 1
            release.wait(30)
            running -= 1
            ended += 1

        first, second = (asyncio.ensure_future(writers.run(call)) for _ in range(2))
        with acting_as(Tenant("bob")):
            assert await writers.run(lambda: "bob does not wait") == "bob does not wait"
        first.cancel()
        await settle()
        assert not first.done(), "its call is at work"
        release.set()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await second
        assert (running, ended) == (0, 2)
        writers.close()

    asyncio.run(main())
