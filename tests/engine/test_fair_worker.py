"""R-31: callers of a shared process take turns, leave the queue when they go, and see its faults in the probes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from headrace.engine import fair_worker, tenants
from headrace.engine.fair_worker import FairWorker
from headrace.engine.tenants import Tenant, acting_as
from headrace.protocol.errors import EngineDeadError, RequestError
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    bounded_process = BoundedProcess(sandbox.__name__, sandbox.MAX_CPU_SECONDS)
    yield bounded_process
    bounded_process.close()


def order_of_turns(process: BoundedProcess) -> list[str]:
    """Alice sends three jobs and Bob one, while the first of Alice's runs."""

    async def run() -> list[str]:
        worker, free, done = FairWorker(process), threading.Event(), []

        def job(name: str) -> Awaitable[None]:
            return worker.run(lambda: (free.wait(20), done.append(name))[1])

        calls = []
        for name in ("alice 1", "alice 2", "alice 3", "bob"):
            with acting_as(Tenant(name.partition(" ")[0])):
                calls.append(asyncio.create_task(job(name)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*calls)
        worker.close()
        return done

    return asyncio.run(run())


def test_R_31_callers_take_turns(process: BoundedProcess) -> None:
    assert order_of_turns(process) == ["alice 1", "alice 2", "bob", "alice 3"]


def test_R_31_control_without_names_the_queue_is_one(process: BoundedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "current", lambda: Tenant())
    assert order_of_turns(process) == ["alice 1", "alice 2", "alice 3", "bob"]


def test_R_31_who_has_gone_is_not_worked_for(process: BoundedProcess) -> None:
    async def run() -> list[int]:
        worker, free, done = FairWorker(process), threading.Event(), []
        calls = [asyncio.create_task(worker.run(lambda i=i: (free.wait(20), done.append(i)))) for i in range(4)]  # type: ignore[misc]
        await asyncio.sleep(0)
        # One that runs, and one that waits.
        for call in (calls[0], calls[2]):
            call.cancel()
        await asyncio.wait([calls[0], calls[2]])
        free.set()
        await asyncio.gather(calls[1], calls[3])
        worker.close()
        with pytest.raises(EngineDeadError):
            await worker.run(lambda: None)
        return done

    assert asyncio.run(run()) == [0, 1, 3]


def logged_by_loop(process: BoundedProcess) -> list[object]:
    """What the loop reports after the job of a caller who has gone has failed."""

    async def run() -> list[object]:
        reports: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
        worker, free, done = FairWorker(process), threading.Event(), threading.Event()

        def fail() -> None:
            free.wait(20)
            done.set()
            raise RequestError("text", "private words", "another")

        call = asyncio.create_task(worker.run(fail))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        free.set()
        await until(done.is_set)
        await worker.run(lambda: None)
        del call
        gc.collect()
        worker.close()
        return reports

    return asyncio.run(run())


def test_S_22_the_error_of_a_caller_who_has_gone_is_not_logged(process: BoundedProcess) -> None:
    assert logged_by_loop(process) == []


def test_S_22_control_an_error_that_is_left_alone_is_logged(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(worker: FairWorker, work: Callable[[], object]) -> object:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work))

    monkeypatch.setattr(FairWorker, "run", run)
    assert "private words" in str(logged_by_loop(process))


def test_R_31_closing_refuses_who_waits(process: BoundedProcess) -> None:
    async def run() -> list[BaseException]:
        worker, free = FairWorker(process), threading.Event()
        calls = [asyncio.create_task(worker.run(lambda: free.wait(20))) for _ in range(3)]
        await asyncio.sleep(0)
        worker.close()
        free.set()
        return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]

    first, *others = asyncio.run(run())
    assert first is True
    assert all(isinstance(error, EngineDeadError) for error in others)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_R_31_an_idle_process_that_stands_still_is_seen_and_replaced(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_worker, "PING_S", 0.05)
    process.watchdog.timeout, process.watchdog.interval = 0.6, 0.05

    async def run() -> list[int]:
        worker = FairWorker(process)
        pids = []
        await worker.run(process.ping)
        for _ in range(2):
            assert process.pid is not None
            pids.append(process.pid)
            os.kill(pids[-1], signal.SIGSTOP)
            await until(lambda: worker.status != "ready")
            await until(lambda: worker.status == "ready" and process.pid is not None)
        # One that can not be started stays red until it can.
        assert process.pid is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", "/nothing/there")
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: worker.status == "impaired")
        await until(lambda: worker.status == "ready")
        worker.close()
        return pids

    assert len(set(asyncio.run(run()))) == 2
